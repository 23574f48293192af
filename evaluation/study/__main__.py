"""Run a blind study: raters choose the better of two models' images.

examples:
  python -m evaluation.study power --protocol.margin 0.05
  python -m evaluation.study prepare --sets runs/samples/a/g8-s50-own,runs/samples/b/g8-s50-own --output runs/study
  python -m evaluation.study invite 15 --output runs/study
  python -m evaluation.study serve --output runs/study
  python -m evaluation.study analyse --output runs/study

commands (each has its own --help):
  python -m evaluation.study power     find how many raters and prompts a margin requires
  python -m evaluation.study prepare   write the images and the protocol into the study's folder
  python -m evaluation.study invite    print links for more raters; `--again 3` replaces rater 3's link
  python -m evaluation.study serve     serve the raters' page until Ctrl-C
  python -m evaluation.study status    show each rater's progress
  python -m evaluation.study analyse   compute the results: results.json, results.html and results.png
"""

import shards.base.interrupt  # noqa: F401

# isort: split

import argparse
from collections.abc import Callable

from evaluation.study.config import StudyConfig
from evaluation.study.protocol import check_pictures, read_study
from evaluation.study.schedule import make_schedule
from evaluation.study.votes import open_votes
from shards.base.config import load_config, parse_subcommand
from shards.base.errors import RequestError, console

PROG = "evaluation.study"
WILDCARDS = ("0.0.0.0", "::")
"""Hosts with which the server listens at all addresses of the machine, so they are not an address to visit."""


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
    """Find how many raters and prompts a margin requires.

    examples:
      python -m evaluation.study power --protocol.margin 0.05
      python -m evaluation.study power --protocol.margin 0.1 --power.raters 10,30 --power.prompts 200
    """
    from evaluation.study.statistics.power import format_power, power_table

    rows = power_table(config.power, config.protocol.votes_per_item, config.protocol.margin)
    print(format_power(rows, config.protocol.margin, config.power.wanted))


def prepare(config: StudyConfig, options: argparse.Namespace) -> None:
    """Write the images and the protocol into the study's folder.

    examples:
      python -m evaluation.study prepare --sets runs/samples/a/g8-s50-own,runs/samples/b/g8-s50-own --output runs/study
      python -m evaluation.study prepare --config configs/study.yaml --sets a,b --protocol.raters 20
    """
    from evaluation.study.prepare import prepare as write  # imports diffusers, which the other commands do not need

    protocol = write(config.sets, config.protocol, config.output)
    study = read_study(config.output)
    with open_votes(study):
        shown = [len(showings) for showings in make_schedule(study)]
    for letter, model in zip(protocol.letters, protocol.models, strict=True):
        print(f"{letter}: {model['place']}")
    counts = f"{len(protocol.items)} items, {config.protocol.raters} raters"
    print(f"{counts}; each rater sees {min(shown)} to {max(shown)} pairs")
    print(f"Protocol {protocol.sha256}: send this hash to someone before the first vote.")


def invite(config: StudyConfig, options: argparse.Namespace) -> None:
    """Print links for more raters. Save the links, because they are not stored. `--again 3` replaces rater 3's link.

    examples:
      python -m evaluation.study invite 15 --output runs/study
      python -m evaluation.study invite --again 3 --output runs/study
    """
    if options.again is not None and options.count is not None:
        raise RequestError("Pass either a number of raters to invite, or --again to replace a link, but not both.")
    serving = config.serve
    if serving.origin is None and serving.host in WILDCARDS:
        raise RequestError(
            f"The links must contain the address at which raters reach this machine, which --serve.host {serving.host} "
            f"does not say. Set --serve.origin, such as http://study.example:{serving.port}."
        )
    study = read_study(config.output)
    num_raters = study.protocol.config.raters
    with open_votes(study) as votes:
        if options.again is not None:
            if options.again - 1 not in votes.invited():
                raise RequestError(
                    f"Rater {options.again} has not been invited yet, so there is no link to replace. To invite more "
                    f"raters, run `python -m {PROG} invite NUMBER`."
                )
            tokens = {options.again - 1: votes.invite(options.again - 1)}
        else:
            tokens = votes.invite_more(options.count or 0, num_raters)
            if not tokens:
                num_invited = len(votes.invited())
                left = num_raters - num_invited
                advice = f"Pass a number of raters, as in `python -m {PROG} invite {left}`. " if left else ""
                raise RequestError(
                    f"The protocol has {num_raters} raters, and the number invited so far is {num_invited}. {advice}"
                    f"To replace a lost link, use --again with the rater's number."
                )
        origin = serving.origin or f"http://{serving.host}:{serving.port}"
        for rater, token in tokens.items():
            print(f"{rater + 1}\t{origin}/#{token}")


def serve(config: StudyConfig, options: argparse.Namespace) -> None:
    """Serve the raters' page until Ctrl-C. `python -m evaluation.study invite 15` prints the links.

    examples:
      python -m evaluation.study serve --output runs/study
      python -m evaluation.study serve --output runs/study --serve.port 8770 --serve.origin https://study.example
    """
    from evaluation.study.server import serve as serve_page

    study = read_study(config.output)
    check_pictures(study)
    with open_votes(study) as votes:
        invited = f"Raters invited: {len(votes.invited())} of {study.protocol.config.raters}"
        print(f"{invited}. To invite more, run `python -m {PROG} invite NUMBER --output {config.output}`.")
        serve_page(study, votes, config.serve)


def status(config: StudyConfig, options: argparse.Namespace) -> None:
    """Show each rater's progress, without revealing any votes.

    examples:
      python -m evaluation.study status --output runs/study
    """
    study = read_study(config.output)
    with open_votes(study) as votes:
        invited = votes.invited()
        for rater, showings in enumerate(make_schedule(study)):
            done = f"{votes.num_done(rater)} of {len(showings)}"
            print(f"rater {rater + 1}: {done if rater in invited else 'not invited'}")


def analyse(config: StudyConfig, options: argparse.Namespace) -> None:
    """Write results.json, results.html and results.png, and print a summary.

    examples:
      python -m evaluation.study analyse --output runs/study
      python -m evaluation.study analyse --output runs/study --partial true
    """
    from evaluation.study.analysis import analyse as count_votes
    from evaluation.study.results import format_results, write_results

    study = read_study(config.output)
    with open_votes(study) as votes:
        results = count_votes(study, votes.all(), config.partial)
    write_results(results, config.output)
    print(format_results(results))


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
