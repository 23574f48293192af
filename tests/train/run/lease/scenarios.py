"""Orders of calls in which a lease with a mistake fails. A correct lease must survive all of them."""

from tests.train.run.lease.machines import TTL, FolderMachine, LeaseMachine, StoreMachine


def proceed_to(machine: LeaseMachine, which: int, kinds: set[str], part: str) -> None:
    """Let a launch proceed until its next call is of one of `kinds`, or to its end.

    Args:
        part: of the object's name, or the end of the path.
    """
    running = machine.running[which]
    while running in machine.running:
        kind, argument = running.call
        if kind == "file" and argument[0] in kinds and argument[1].endswith(part):
            return
        if kind in kinds and part in (argument[0] if isinstance(argument, tuple) else argument):
            return
        machine.proceed(which, 1)


def check_after_each_call(machine: LeaseMachine) -> None:
    """Two launches run one after the other. Readers may look, and launches may be killed, after each of their calls."""
    for _ in range(2):
        machine.start()
        while machine.running:
            machine.proceed(0, 1)
            machine.readers_see_one_lineage()


def run_alone(machine: LeaseMachine) -> None:
    """A launch runs to its end, and then a second one."""
    for _ in range(2):
        machine.start()
        machine.finish(0)
        machine.readers_see_one_lineage()


# at a URL


def lose_the_reply_to_create(machine: StoreMachine) -> None:
    """A launch creates its record, and the client repeats the request because the reply is lost."""
    machine.start()
    proceed_to(machine, 0, {"create"}, "launches/0001")
    machine.lose_a_reply(0)
    machine.finish(0)


def claim_the_same_number(machine: StoreMachine) -> None:
    """Two launches find the run free, and then both try to acquire it."""
    for which in range(2):
        machine.start()
        proceed_to(machine, which, {"create", "write"}, "launches/0001")
    machine.proceed(0, 1)
    machine.launches_are_unique()
    machine.proceed(1, 1)
    machine.launches_are_unique()
    machine.finish(1)


def save_while_the_successor_starts(machine: StoreMachine) -> None:
    """A launch that is taken for dead completes a checkpoint just before its successor creates its record."""
    machine.start()
    proceed_to(machine, 0, {"create"}, "step-00000001")
    machine.start()
    proceed_to(machine, 1, {"create"}, "launches/0002")
    machine.proceed(0, 1)
    machine.readers_see_one_lineage()
    machine.finish(1)


def upload_after_the_successor_saved(machine: StoreMachine) -> None:
    """A launch is suspended during an upload, and resumes after its successor saved the same step."""
    machine.start()
    proceed_to(machine, 0, {"write"}, "weights")
    machine.start()
    proceed_to(machine, 1, {"write"}, "step-00000002")
    machine.readers_see_one_lineage()
    machine.finish(0)
    machine.readers_see_one_lineage()
    machine.finish(0)


def die_during_a_removal(machine: StoreMachine) -> None:
    """A launch is killed after it has removed one file of an old checkpoint."""
    machine.start()
    proceed_to(machine, 0, {"remove"}, "step-00000001")
    machine.proceed(0, 1)
    machine.crash(0, "not sent")


# in a folder


def claim_the_same_number_in_a_folder(machine: FolderMachine) -> None:
    """Two launches find the run free, and then both create the first record."""
    for which in range(2):
        machine.start()
        proceed_to(machine, which, {"link", "replace"}, "")
    machine.finish(0)
    machine.launches_are_unique()
    machine.finish(0)


def claim_an_old_number(machine: FolderMachine) -> None:
    """A launch finds the run free, and is suspended while two others acquire the run one after the other."""
    machine.start()
    proceed_to(machine, 0, {"mkdir"}, "")
    for _ in range(2):
        machine.start()
        proceed_to(machine, 1, {"mkdir"}, "step-00000001")
        machine.launches_are_unique()
        machine.readers_see_one_lineage()
        if machine.number == 2:
            machine.crash(1, "not sent")
    machine.proceed(0, 6)
    machine.launches_are_unique()
    machine.finish(0)


def take_over_before_the_staging_folder_exists(machine: FolderMachine) -> None:
    """A launch is suspended right after it created its record, and resumes after its successor acquired the run."""
    machine.start()
    proceed_to(machine, 0, {"link"}, "")
    machine.proceed(0, 1)
    machine.start()
    proceed_to(machine, 1, {"mkdir"}, "step-00000001")
    machine.readers_see_one_lineage()
    machine.finish(0)
    machine.readers_see_one_lineage()
    machine.finish(0)


def publish_after_the_successor_saved(machine: FolderMachine) -> None:
    """A launch is suspended before its last rename, and resumes after its successor has saved."""
    machine.start()
    proceed_to(machine, 0, {"rename", "replace"}, "step-00000001")
    machine.start()
    machine.finish(1)
    machine.readers_see_one_lineage()
    machine.finish(0)


def complete_after_the_successor_saved(machine: FolderMachine) -> None:
    """A launch is suspended before it writes state.json, and resumes after its successor has saved."""
    machine.start()
    for _ in range(2):  # the weights are written, and then read to be hashed
        proceed_to(machine, 0, {"open"}, "unet/weights")
        machine.proceed(0, 1)
    machine.start()
    machine.finish(1)
    machine.readers_see_one_lineage()
    machine.finish(0)


def publish_after_an_interrupted_takeover(machine: FolderMachine) -> None:
    """A launch is suspended before its last rename; one successor dies before it fences, and the next one saves."""
    machine.start()
    proceed_to(machine, 0, {"replace"}, "step-00000001")
    machine.start()
    proceed_to(machine, 1, {"rename"}, "")
    machine.crash(1, "not sent")
    machine.shared.now += 2 * TTL
    machine.start()
    machine.finish(1)
    machine.readers_see_one_lineage()
    machine.finish(0)


def publish_after_the_successor_chose(machine: FolderMachine) -> None:
    """A launch that is taken for dead saves twice after its successor chose the checkpoint to resume from."""
    machine.start()
    proceed_to(machine, 0, {"replace"}, "step-00000001")
    machine.start()
    proceed_to(machine, 1, {"link"}, "")
    proceed_to(machine, 0, {"replace"}, "step-00000003")
    machine.readers_see_one_lineage()
    machine.finish(1)


ANY = [run_alone, check_after_each_call]
STORE = [
    lose_the_reply_to_create,
    claim_the_same_number,
    save_while_the_successor_starts,
    upload_after_the_successor_saved,
    die_during_a_removal,
]
FOLDER = [
    claim_the_same_number_in_a_folder,
    take_over_before_the_staging_folder_exists,
    claim_an_old_number,
    publish_after_the_successor_saved,
    complete_after_the_successor_saved,
    publish_after_an_interrupted_takeover,
    publish_after_the_successor_chose,
]
