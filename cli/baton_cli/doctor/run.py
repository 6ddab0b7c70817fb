"""`baton doctor`: checks this machine and what the flags name, and says what to do.

In: DoctorOptions. Out: findings on stdout; 0 if nothing is wrong, 3 for warnings only, 1 for
errors.
"""

from __future__ import annotations

from baton_cli.doctor.examination import examine
from baton_cli.doctor.finding import exit_code
from baton_cli.doctor.host import Host
from baton_cli.doctor.options import DoctorOptions
from baton_cli.doctor.report import as_json, as_text
from baton_cli.logs import configure


def run(options: DoctorOptions) -> int:
    configure(options.log_level, options.json_logs)
    findings = examine(options, Host())
    print(as_json(findings) if options.json else as_text(findings))
    return exit_code(findings)
