"""Start Baton's commands in tests, and pytest's workers, without importing their modules again.

A router's imports take a second of CPU time, those of a node and its engine one to three, and the
tests start some hundred of each. So each pytest worker has a fork server: a process that has
imported all of Baton, and forks where `Popen` would execute `python -m baton_cli ...`. A command
that starts others (`baton up` its nodes, a node its engine) forks them itself.

Where pytest runs several workers, its own process has a fork server too, which has also imported
the test files, and forks the workers. A worker begins by forking its fork server.

The forked process has the arguments, environment, standard streams, session and parent that an
executed one would have. `Popen` still executes what is not in MODULES, and what gets a variable
that an interpreter or a library may read at its start (see EARLY). With a Python whose `Popen` is
another one, it executes all.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "baton_cli",
    "baton_cli.engine_process",
    "tests.faults.kv.writer_process",
    "tests.support.nodes.serve_node",
)
COMMANDS = tuple(("-m", module) for module in MODULES)
# What a fork server imports: all that commands import when they start. Not MODULES, which run.
IMPORTED = (
    "baton_cli.main",
    "baton_cli.commands.generate",
    "baton_cli.commands.roles",
    "baton_cli.commands.up",
    "baton_decode_node.fetcher",
    "baton_decode_node.serve",
    "baton_decode_node.write_behind",
    "baton_engine.build",
    "baton_engine.sim.build",
    "baton_node.engine.loop",
    "baton_node.engine.main",
    "baton_prefill_node.publisher",
    "baton_prefill_node.serve",
    "baton_router.server.router",
    # Libraries import it with the first address that they look up, and it takes 25 ms.
    "encodings.idna",
)
# What tests import beside it, as far as it takes long.
IMPORTED_BY_TESTS = (
    *("hypothesis.strategies", "kopf", "kubernetes", "openai", "pytest", "torch"),
    *("transformers", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
)
IMPORTER = "tests.support.imported_tests"  # the test files, in a pytest of its own
# How xdist starts a worker.
WORKER = ("-u", "-c", "import sys;exec(eval(sys.stdin.readline()))")
# A variable that makes `Popen` execute what it would fork, whatever its value.
EXECUTE = "EXECUTE"
# How the variables begin, or what they are, that an interpreter or a library reads when it is
# loaded. A worker's are those that it began with: what a test file sets must not be among them.
EARLY = (
    *("CUDA_", "FAKETIME", "GLIBC_", "GOMP_", "HF_", "HOME", "HUGGINGFACE_", "KMP_", "LC_", "LD_"),
    *("MALLOC_", "MKL_", "NUMBA_", "OMP_", "PYTHON", "TRITON_", "TZ", "XDG_"),
)
EARLY_NAMES = ("LANG", "LANGUAGE")
# Room for a command line and an environment. A forked process writes its own over those that the
# fork server was started with, so that `ps` and tests find it by them.
COMMAND_BYTES, ENVIRONMENT_BYTES = 8 << 10, 64 << 10
PADDING = "TEST_PADDING"
MODEL_FLAG = "--model"
BLOCK_SIZE = 16  # of most pools of tests
MOVED = 512  # descriptors from here on do not collide with those that a process asks for
REQUEST_BYTES = 1 << 20
MOST_FILES = 16
_PR_SET_CHILD_SUBREAPER = 36


class _Call(NamedTuple):
    """The arguments of Popen._execute_child."""

    args: Any
    executable: Any
    preexec_fn: Any
    close_fds: bool
    pass_fds: Sequence[int]
    cwd: Any
    env: Mapping[str, str] | None
    startupinfo: Any
    creationflags: int
    shell: bool
    p2cread: int
    p2cwrite: int
    c2pread: int
    c2pwrite: int
    errread: int
    errwrite: int
    restore_signals: bool
    gid: Any
    gids: Any
    uid: Any
    umask: int
    start_new_session: bool
    process_group: int


class Start(msgspec.Struct):
    """A process to fork. `files` are the numbers that it knows its open files by."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    new_session: bool
    process_group: int
    parent: int

    @property
    def is_worker(self) -> bool:
        return tuple(self.argv[1:]) == WORKER


def install(*, workers: bool, tests: Sequence[str] = ()) -> None:
    """Let this process's `Popen` fork the commands of Baton, and pytest's workers if `workers`,
    from a fork server. `tests` are pytest's arguments that say which files the workers import. It
    needs Linux. A worker that uses a GPU must not be forked: some imports of transformers look for
    one."""
    if sys.platform == "linux":
        commands = (*COMMANDS, WORKER) if workers else COMMANDS
        _server.tests = tests
        _install(_server.fork, lambda: _server.variables, commands)


def _install(
    fork: Callable[[Start, Sequence[int]], int],
    variables: Callable[[], Mapping[str, str]],
    commands: Sequence[tuple[str, ...]],
) -> None:
    """`variables` are those that the forking process was started with, `commands` the first
    arguments of what is forked."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    if tuple(inspect.signature(execute).parameters) != ("self", *_Call._fields):
        return

    def execute_or_fork(self: Any, *arguments: Any) -> None:
        call = _Call(*arguments)
        environment = os.environ if call.env is None else call.env
        forks = EXECUTE not in environment and _is_known(call, commands)
        if not forks or _early(environment) != variables():
            execute(self, *arguments)
            return
        sys.audit("subprocess.Popen", sys.executable, call.args, call.cwd, call.env)
        ends = (call.p2cread, call.c2pwrite, call.errwrite)
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        start = Start(
            argv=[str(word) for word in call.args],
            environment=dict(environment),
            folder=os.fspath(call.cwd or os.getcwd()),
            files=[0, 1, 2, *call.pass_fds],
            new_session=call.start_new_session,
            process_group=call.process_group,
            parent=os.getpid(),
        )
        self.pid = fork(start, [*streams, *call.pass_fds])
        self._child_created = True
        self._close_pipe_fds(
            *(call.p2cread, call.p2cwrite, call.c2pread, call.c2pwrite),
            *(call.errread, call.errwrite),
        )

    subprocess.Popen._execute_child = execute_or_fork  # type: ignore[attr-defined]


def _is_known(call: _Call, commands: Sequence[tuple[str, ...]]) -> bool:
    """Whether a call is of one of the commands, with nothing that a fork server cannot do."""
    words = () if isinstance(call.args, str | bytes) else (*call.args,)
    return (
        words[:1] == (sys.executable,)
        and any(words[1 : 1 + len(command)] == command for command in commands)
        and call.executable in (None, sys.executable)
        and call.preexec_fn is None
        and call.close_fds
        and not call.shell
        and call.gid is call.gids is call.uid is None
        and call.umask < 0
        and len(call.pass_fds) <= MOST_FILES - 3
        and sum(len(word) + 1 for word in words) < COMMAND_BYTES
    )


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may matter at the start of an interpreter."""
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(EARLY) or name in EARLY_NAMES
    }


class _ForkServer:
    """The client of a fork server, which is started when it is first needed, and ends with this
    process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._variables: Mapping[str, str] = {}
        self.tests: Sequence[str] = ()

    def begin(self) -> None:
        """Fork the server from this process, which has imported what it needs and has no threads
        yet."""
        ours, theirs = _sockets()
        self._variables = _early(os.environ)
        nothing = os.open(os.devnull, os.O_RDWR)
        pid = os.fork()
        if not pid:
            ours.close()
            for number in (0, 1):
                os.dup2(nothing, number)
            _serve(theirs)
            os._exit(0)
        os.close(nothing)
        theirs.close()
        self._socket = ours
        _at_exit(ours, lambda: os.waitpid(pid, 0))

    @property
    def variables(self) -> Mapping[str, str]:
        return self._variables if self._socket else _early(os.environ)

    def fork(self, start: Start, files: Sequence[int]) -> int:
        """Return the pid of a new child of this process."""
        with self._lock:
            if self._socket is None:
                self._variables = _early(os.environ)
                self._socket = _started(self.tests if start.is_worker else None)
            ours = self._socket
            # The process that forks it ends at once, and the kernel then makes us its parent.
            _adopt_orphans(True)
            try:
                socket.send_fds(ours, [msgspec.json.encode(start)], files)
                answer = ours.recv(64)
            finally:
                _adopt_orphans(False)
        assert answer, "the fork server has ended"
        return int(answer)


_server = _ForkServer()
_set_by_tests: dict[str, str] = {}  # variables that test files set where they are imported


def _sockets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
    return ours, theirs


def _at_exit(ours: socket.socket, wait: Callable[[], object]) -> None:
    """End a fork server with this process."""

    def end() -> None:
        ours.close()
        wait()

    atexit.register(end)


def _started(tests: Sequence[str] | None) -> socket.socket:
    ours, theirs = _sockets()
    arguments = f"{theirs.fileno()}, {tests!r}"
    code = f"from tests.support.fork_server import serve; serve({arguments})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, " " * COMMAND_BYTES],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, PADDING: " " * ENVIRONMENT_BYTES},
            cwd=ROOT,
            pass_fds=(theirs.fileno(),),
        )
    _at_exit(ours, process.wait)
    return ours


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def serve(number: int, tests: Sequence[str] | None) -> None:
    """The main of a fork server: fork until the socket `number` closes. With `tests`, which say
    what pytest collects, it forks workers."""
    del os.environ[PADDING]
    gc.disable()  # it would look through what is imported, again and again
    for name in (*IMPORTED, *(() if tests is None else IMPORTED_BY_TESTS)):
        importlib.import_module(name)
    _load_numba()
    if tests is not None:
        before = {*os.environ.items()}
        importlib.import_module(IMPORTER).import_tests(tests)
        _set_by_tests.update({*os.environ.items()} - before)
    gc.enable()
    gc.collect()
    _serve(socket.socket(fileno=number))


def _load_numba() -> None:
    """Load what numba otherwise loads with a process's first kernel, in a third of a second."""
    registry = importlib.import_module("numba.core.registry")
    registry.cpu_target.typing_context.refresh()
    registry.cpu_target.target_context.refresh()


def _serve(requests: socket.socket) -> None:
    """Fork until the socket closes."""
    own = _early(os.environ)
    while True:
        request, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES, MOST_FILES)
        if not request:
            return
        start = msgspec.json.decode(request, type=Start)
        if MODEL_FLAG in start.argv:
            _test_products(start.argv[start.argv.index(MODEL_FLAG) + 1])
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            while os.getppid() != start.parent:
                time.sleep(0.0002)
            requests.send(str(os.getpid()).encode())
            requests.detach()
            if not start.is_worker:
                _install(_fork_here, lambda: own, COMMANDS)
            _become(start, files)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


@functools.cache
def _test_products(model: str) -> None:
    """Test the products of a model's heads, which takes half of the time in which an engine of a
    small model starts: the engines that are forked from here remember the result."""
    if not (Path(model) / "config.json").is_file():
        return
    torch = importlib.import_module("torch")
    exact = "baton_engine.attention.exact"
    products = importlib.import_module(f"{exact}.batched_products").BatchedProducts
    keys = importlib.import_module(f"{exact}.splits").Splits(BLOCK_SIZE, None).keys
    _keep_to_one_thread()
    families = importlib.import_module("baton_engine.config.families")
    with contextlib.suppress(families.ModelError):  # the engine itself reports it
        head_dim = families.read_config(Path(model)).head_dim
        for dtype in (torch.float32, torch.bfloat16):
            device = torch.device("cpu")
            products.for_heads(dtype, device, head_dim, value_dim=head_dim, keys=keys)


def _fork_here(start: Start, files: Sequence[int]) -> int:
    """Fork a child of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside idle threads
        pid = os.fork()
    if not pid:
        _become(start, files)
    return pid


def _become(start: Start, files: Sequence[int]) -> NoReturn:
    """Run as the started process, and end."""
    code = 1
    try:
        _forget_the_forker()
        _take_files(start.files, files)
        if start.new_session:
            os.setsid()
        elif start.process_group >= 0:
            os.setpgid(0, start.process_group)
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update(start.environment)
        _show(start.argv, start.environment)
        if start.is_worker:
            os.environ.update(_set_by_tests)
            _server.begin()
            code = _run_code(start.argv[3])
        else:
            sys.path[0] = start.folder
            _keep_to_one_thread()
            code = _run_module(start.argv[2], start.argv[3:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _forget_the_forker() -> None:
    """Drop what an executed process would not have: handlers of signals and of the end, objects
    whose collection would close files that are now others', a folder for temporary files."""
    gc.freeze()
    tempfile.tempdir = None
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, own)
    asyncio._set_running_loop(None)
    for handler in [*logging.root.handlers]:
        logging.root.removeHandler(handler)


def _keep_to_one_thread() -> None:
    """Let torch start no threads of its own before an engine says how many it uses: a fork has none
    of its parent's, and OpenMP would wait for them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _take_files(numbers: Sequence[int], files: Sequence[int]) -> None:
    """Open `files` under these numbers, and close all others."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, MOVED) for file in files]
    for number, file in zip(numbers, moved, strict=True):
        os.dup2(file, number)
    last = max(int(name) for name in os.listdir("/proc/self/fd"))
    for begin, end in zip([2, *sorted(numbers[3:])], [*sorted(numbers[3:]), last + 1], strict=True):
        os.closerange(begin + 1, end)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _show(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show this command line and environment in /proc."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    arguments, arguments_end, variables, variables_end = (int(field) for field in fields[45:49])
    words = [os.fsencode(word) for word in argv]
    pairs = [os.fsencode(f"{name}={text}") for name, text in environment.items()]
    for begin, end, texts in (
        (arguments, arguments_end, words),
        (variables, variables_end, pairs),
    ):
        block = b"\0".join(texts) + b"\0"
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, block, min(len(block), end - begin - 1))


def _run_module(module: str, arguments: Sequence[str]) -> int:
    """Run the module as `python -m` does, and return the exit code."""
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{module}.__main__")
    assert spec is not None
    assert spec.origin is not None
    assert isinstance(spec.loader, SourceFileLoader)
    code = spec.loader.get_code(spec.name)
    assert code is not None
    names = {"__file__": spec.origin, "__spec__": spec, "__package__": spec.parent}
    return _run(code, [spec.origin, *arguments], names)


def _run_code(text: str) -> int:
    """Run the text as `python -c` does, and return the exit code."""
    sys.path[0] = ""
    return _run(compile(text, "<string>", "exec"), ["-c"], {})


def _run(code: types.CodeType, argv: list[str], names: Mapping[str, object]) -> int:
    sys.argv = argv
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(names)
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return status
