"""`make cluster-tools`: everything of the test cluster that takes long, once, with a word on each.

In: Go modules, Debian's and Python's packages. Out: the programs, the checkers of manifests and the
images in the user's cache.
Where Go, apt or the rights are missing it says so and ends well: the tests that need them
skip.
"""

from __future__ import annotations

from tests.cluster.machine.builds import build_small
from tests.cluster.machine.checkers import build_checkers
from tests.cluster.machine.disk import node_disk
from tests.cluster.machine.programs import build_programs, say
from tests.support.needs import NEEDS
from tests.support.project.debian import install_needed


def main() -> None:
    if not _present("control_plane"):
        return
    programs = build_programs(say)
    build_checkers(say)
    if _present("cluster"):
        install_needed(say)
        node_disk(programs, build_small(say), say)


def _present(need: str) -> bool:
    present = NEEDS[need].present()
    if not present:
        say(f"this machine lacks {NEEDS[need].meaning}: tests that need a {need} will skip")
    return present


if __name__ == "__main__":
    main()
