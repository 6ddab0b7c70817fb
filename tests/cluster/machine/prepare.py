"""`make cluster-tools`: builds the slow parts of the test cluster once, and reports its progress.

In: Go modules, packages of Debian and Python. Out: the programs, the checkers of manifests and the
images, in the user's cache. If Go, apt or the needed rights are missing, it reports that and exits
with 0, and the tests that need them skip.
"""

from __future__ import annotations

from tests.cluster.machine.builds import build_small
from tests.cluster.machine.checkers import build_checkers
from tests.cluster.machine.disk import node_disk
from tests.cluster.machine.programs import build_programs, print_progress
from tests.support.needs import NEEDS
from tests.support.project.debian import install_needed


def main() -> None:
    if not _present("control_plane"):
        return
    programs = build_programs(print_progress)
    # Checkers last: they take as long as all else, and a first pool needs none.
    if _present("cluster"):
        install_needed(print_progress)
        node_disk(programs, build_small(print_progress), print_progress)
    build_checkers(print_progress)


def _present(need: str) -> bool:
    present = NEEDS[need].present()
    if not present:
        print_progress(
            f"this machine lacks {NEEDS[need].meaning}: tests that need a {need} will skip"
        )
    return present


if __name__ == "__main__":
    main()
