"""Whether another machine's clock agrees with this one's."""

from __future__ import annotations

from baton_cli.doctor.finding import Finding

# Deadlines travel as seconds left, so a second or two changes nothing; certificates, schedules and
# logs are compared in larger steps. A virtual machine without a time service drifts by more.
MOST_S = 5.0
WHY = (
    "no request depends on it, but certificates, schedules and expiry of pinned prefixes do, and "
    "logs cannot be compared"
)


def clock_finding(check: str, what: str, ahead_s: float) -> Finding:
    """`ahead_s` is by how much the clock of `what` is ahead of this machine's."""
    if abs(ahead_s) <= MOST_S:
        return Finding(check=check, severity="ok", found=f"the clock of {what} agrees with ours")
    way = "ahead of" if ahead_s > 0 else "behind"
    return Finding(
        check=check,
        severity="warning",
        found=f"the clock of {what} is {abs(ahead_s):.0f} s {way} this machine's",
        why=WHY,
        remedy="run a time service on both machines; this shows whether one works:",
        commands=("timedatectl show --property=NTPSynchronized",),
    )
