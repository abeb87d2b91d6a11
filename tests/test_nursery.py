"""A process that the nursery forks looks, to its starter, like the one that `subprocess` would have
made."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from worlds.waiting import LIMIT_S, completed, ended, line_of, until_real

pytestmark = pytest.mark.net


def python(*words):
    return [sys.executable, *words]


def test_it_has_the_words_the_environment_the_folder_and_the_streams_that_it_was_given(
    nursery, tmp_path
):
    code = (
        "import os, sys; print(sys.argv[1:], os.getcwd(), sorted(os.environ), sys.stdin.read()); "
        "sys.stderr.write('e')"
    )
    process = nursery.popen(
        python("-c", code, "a", "b"),
        cwd=tmp_path,
        env={"ONE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = process.communicate("in", timeout=LIMIT_S)
    assert said == (f"['a', 'b'] {tmp_path} ['ONE'] in\n", "e")


@pytest.mark.parametrize(
    ("code", "code_of_end"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_it_ends_as_a_process_from_scratch_does(nursery, code, code_of_end):
    for run in (nursery.run, subprocess.run):
        assert completed(python("-c", code), run, capture_output=True).returncode == code_of_end


def test_modules_and_files_run_as_programs(nursery, tmp_path):
    file = tmp_path / "program.py"
    file.write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv, sys.path[0])\n")
    by_path = completed(
        python(str(file), "x"), nursery.run, capture_output=True, text=True, check=True
    )
    assert by_path.stdout == f"{[str(file), 'x']} {tmp_path}\n"
    by_name = completed(
        python("-m", "program", "x"),
        nursery.run,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert by_name.stdout.endswith(f"'x'] {tmp_path}\n")


def test_its_group_hears_a_signal_and_no_other_process_does(nursery):
    code = "import time; print('up', flush=True); time.sleep(3600)"
    process = nursery.popen(
        python("-c", code),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with process:
        assert line_of(process, "its word") == b"up\n"
        assert process.poll() is None
        assert os.getpgid(process.pid) == process.pid
        os.killpg(process.pid, signal.SIGINT)
        assert ended(process, "the process") == -signal.SIGINT


def test_a_keeper_is_in_its_child_s_group_so_that_no_frozen_process_wakes(nursery):
    process = nursery.popen(python("-c", "import sys; sys.stdin.read()"), stdin=subprocess.PIPE)
    with process:
        keeper = psutil.Process(process.pid).parent()
        assert os.getpgid(process.pid) == os.getpgid(keeper.pid) == os.getpgid(0)
        keeper.send_signal(signal.SIGINT)  # as a Ctrl-C would
        process.stdin.close()
        assert ended(process, "the process") == 0, "it still tells how the child ended"


def test_one_that_does_not_end_in_time_is_reported_and_killed(nursery):
    with pytest.raises(subprocess.TimeoutExpired):
        nursery.run(python("-c", "import time; time.sleep(60)"), timeout=0.2)


def test_a_stand_in_is_as_a_process_from_scratch_to_a_shell(nursery, tmp_path):
    python = nursery.stand_in(tmp_path / "python")
    where = nursery.stand_in(
        tmp_path / "where", "-c", "import os, sys; print(os.getcwd(), sys.argv)"
    )
    code = "import os, sys; print(sys.stdin.read(), os.environ['ONE'], sys.argv[1:]); sys.exit(3)"
    shell = f"""echo in | ONE=1 {python} -u -c "{code}" a || echo $?; cd /; {where} b"""
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=240)
    assert done.stdout == "in\n 1 ['a']\n3\n/ ['-c', 'b']\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_what_ends_a_stand_in_ends_its_fork(nursery, tmp_path, number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [nursery.stand_in(tmp_path / "python"), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        fork = psutil.Process(int(process.stdout.readline()))
        # Python drops a Ctrl-C that comes while it runs a callback of its own.
        until_real(lambda: ends_by(process, number), "the end of the stand-in")
        assert process.returncode == -number
        fork.wait(240)


def ends_by(process, number):
    process.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    return process.returncode is not None
