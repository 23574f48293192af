"""A blind study: people say which of two models' pictures they prefer.

examples:
  python -m evaluation.study power --protocol.margin 0.05
  python -m evaluation.study prepare --sets runs/a/samples/g8-s50-own,runs/b/samples/g8-s50-own --output runs/study
  python -m evaluation.study invite 15 --output runs/study
  python -m evaluation.study serve --output runs/study
  python -m evaluation.study analyse --output runs/study

commands, each with a --help of its own:
  python -m evaluation.study power     how many raters and prompts a margin needs
  python -m evaluation.study prepare   pictures and the protocol into the study's folder
  python -m evaluation.study invite    links for so many further raters; `--again 3` is a new one for rater 3
  python -m evaluation.study serve     the page, until Ctrl-C
  python -m evaluation.study status    how far each rater is
  python -m evaluation.study analyse   results.json, results.html and results.png
"""

import shards.base.interrupt  # noqa: F401

# isort: split

import argparse
from collections.abc import Callable

from evaluation.study.config import StudyConfig
from evaluation.study.protocol import check_pictures, read_study
from evaluation.study.schedule import Draws, make_schedule
from evaluation.study.votes import open_votes
from shards.base.config import load_config, parse_subcommand
from shards.base.errors import RequestError, console

PROG = "evaluation.study"


def run(arguments: list[str]) -> None:
    command, rest = parse_subcommand(COMMANDS, arguments, PROG, __doc__)
    parser = argparse.ArgumentParser(prog=f"{PROG} {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    if command == "invite":
        parser.add_argument("--again", type=int)
        if rest and rest[0].isdigit():
            rest = ["--count", *rest]
        parser.add_argument("--count", type=int)
    options, overrides = parser.parse_known_args(rest)
    config = load_config(StudyConfig, options.config, overrides, f"{PROG} {command}", COMMANDS[command].__doc__)
    COMMANDS[command](config, options)


def power(config: StudyConfig, options: argparse.Namespace) -> None:
    """How many raters and prompts a margin needs.

    examples:
      python -m evaluation.study power --protocol.margin 0.05
      python -m evaluation.study power --protocol.margin 0.1 --power.raters 10,30 --power.prompts 200
    """
    from evaluation.study.statistics.power import power_table, render

    rows = power_table(config.power, config.protocol.votes_per_item, config.protocol.margin)
    print(render(rows, config.protocol.margin, config.power.wanted))


def prepare(config: StudyConfig, options: argparse.Namespace) -> None:
    """Put pictures and the protocol into the study's folder.

    examples:
      python -m evaluation.study prepare --sets runs/a/samples/g8-s50-own,runs/b/samples/g8-s50-own --output runs/study
      python -m evaluation.study prepare --config configs/study.yaml --sets a,b --protocol.raters 20
    """
    from evaluation.study.prepare import prepare as write  # diffusers, which the other commands do without

    protocol = write(config.sets, config.protocol, config.output)
    study = read_study(config.output)
    with open_votes(study):
        shown = [len(showings) for showings in make_schedule(protocol, Draws(study.secret, protocol.seed))]
    for letter, model in zip(protocol.letters, protocol.models, strict=True):
        print(f"{letter}: {model['place']}")
    print(f"{len(protocol.items)} items; each of {protocol.raters} raters sees {min(shown)} to {max(shown)}")
    print(f"protocol {protocol.sha256}: send this to somebody before the first vote")


def invite(config: StudyConfig, options: argparse.Namespace) -> None:
    """Print links for so many further raters: they are stored nowhere. `--again 3` prints a new one for rater 3.

    examples:
      python -m evaluation.study invite 15 --output runs/study
      python -m evaluation.study invite --again 3 --output runs/study
    """
    study = read_study(config.output)
    num_raters = study.protocol.raters
    with open_votes(study) as votes:
        invited = votes.invited()
        if options.again is not None:
            if options.again - 1 not in invited:
                raise RequestError(f"Rater {options.again} was not invited yet, so that no link can be made again.")
            chosen = [options.again - 1]
        else:
            chosen = sorted(set(range(num_raters)) - invited)[: max(0, options.count or 0)]
            if not options.count or len(chosen) < options.count:
                raise RequestError(
                    f"The protocol has {num_raters} raters, of whom {len(invited)} are invited. Say how many more: "
                    f"python -m {PROG} invite {max(1, num_raters - len(invited))}; or, where a link was lost, "
                    f"--again NUMBER for a new one in its place."
                )
        serving = config.serve
        origin = serving.origin or f"http://{serving.host}:{serving.port}"
        for rater in chosen:
            print(f"{rater + 1}\t{origin}/#{votes.invite(rater)}")


def serve(config: StudyConfig, options: argparse.Namespace) -> None:
    """Serve the page, until Ctrl-C. Links for raters: python -m evaluation.study invite 15.

    examples:
      python -m evaluation.study serve --output runs/study
      python -m evaluation.study serve --output runs/study --serve.port 8770 --serve.origin https://study.example
    """
    from evaluation.study.serving.server import serve as serve_page

    study = read_study(config.output)
    check_pictures(study)
    with open_votes(study) as votes:
        invited = f"{len(votes.invited())} of {study.protocol.raters} raters are invited"
        print(f"{invited}; more: python -m {PROG} invite NUMBER --output {config.output}")
        serve_page(study, votes, config.serve)


def status(config: StudyConfig, options: argparse.Namespace) -> None:
    """How far each rater is; nothing of what was voted.

    examples:
      python -m evaluation.study status --output runs/study
    """
    study = read_study(config.output)
    schedule = make_schedule(study.protocol, Draws(study.secret, study.protocol.seed))
    with open_votes(study) as votes:
        invited = votes.invited()
        for rater, showings in enumerate(schedule):
            done = f"{votes.num_done(rater)} of {len(showings)}"
            print(f"rater {rater + 1}: {done if rater in invited else 'not invited'}")


def analyse(config: StudyConfig, options: argparse.Namespace) -> None:
    """Write results.json, results.html and results.png, and print the result.

    examples:
      python -m evaluation.study analyse --output runs/study
      python -m evaluation.study analyse --output runs/study --partial true
    """
    from evaluation.study.analysis import analyse as count_votes
    from evaluation.study.output.results import render, write_results

    study = read_study(config.output)
    with open_votes(study) as votes:
        results = count_votes(study, votes.all(), config.partial)
    write_results(results, config.output)
    print(render(results))


COMMANDS: dict[str, Callable[[StudyConfig, argparse.Namespace], None]] = {
    "power": power,
    "prepare": prepare,
    "invite": invite,
    "serve": serve,
    "status": status,
    "analyse": analyse,
}

main = console(run)

if __name__ == "__main__":
    main()
