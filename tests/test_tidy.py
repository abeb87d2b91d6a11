"""The house's style as tests: short functions, one printer, no hidden clock, no leftovers.

A rule that cannot fail protects nothing, so each detector is also shown a case that it must find.
"""

import ast
import re
import statistics
from pathlib import Path

import pytest
from tidy import measure

ROOT = Path(__file__).parents[1]
FOLDERS = ("farflock", "node", "swarm", "optimizers", "compression", "experiments")
CODE = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not (folder == "farflock" and path.relative_to(ROOT).parts[1] in FOLDERS)
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TREES = {path: measure.parsed(path) for path in CODE}
PURE = [
    path
    for path in CODE
    if path.relative_to(ROOT).parts[0] in ("swarm", "optimizers", "compression")
]
# where sockets, files and other people's code are
BORDERS = re.compile(r"swarm/(zmq/\w+|dht/\w+|identity)\.py")
PRINTER = ROOT / "node" / "cli" / "output.py"

P95_FUNCTION, MEDIAN_FUNCTION = 45, 10
VAGUE_NAMES = {
    "utils",
    "util",
    "common",
    "helpers",
    "helper",
    "manager",
    "managers",
    "base",
    "types",
    "misc",
}
TEST_SHARE = 0.8


def name(path):
    return path.relative_to(ROOT).as_posix()


def functions(tree):
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def length(function):
    return function.end_lineno - function.lineno + 1


def dotted(node):
    """`a.b.c` of an expression, or an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree):
    """Dotted names that a tree imports, also `package.name` for `from package import name`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def loose_ends(tree):
    """Code that lets a stranger's bytes run, or hides an error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in {
            "eval",
            "exec",
            "torch.load",
            "__import__",
        }:
            yield node.lineno, f"calls {dotted(node.func)}"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "a bare except"
    for module in imported(tree) & {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}:
        yield 0, f"imports {module}"


def hidden_inputs(tree):
    """Clocks, chance and surroundings that were not handed in."""
    for module in imported(tree) & {
        "time",
        "datetime",
        "secrets",
        "socket",
        "threading",
        "subprocess",
    }:
        yield 0, f"imports {module}"
    for node in ast.walk(tree):
        text = dotted(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"random\.(?!Random$)\w+|(np|numpy)\.random\..*", text):
            yield node.lineno, f"uses the global {text}"
        if text in {"os.environ", "os.getenv", "os.urandom"}:
            yield node.lineno, f"reads {text}"
        call = dotted(node.func) if isinstance(node, ast.Call) else ""
        if call in {"torch.manual_seed", "torch.seed"} or (
            call == "random.Random" and not node.args
        ):
            yield node.lineno, f"{call}: chance comes from a seed of the run"


def printers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in {
            "print",
            "sys.stdout.write",
            "click.echo",
        }:
            yield node.lineno, f"calls {dotted(node.func)}"


def complaints(paths, rule):
    return [f"{name(path)}:{line}: {what}" for path in paths for line, what in rule(TREES[path])]


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (loose_ends, "eval('1')"),
        (loose_ends, "torch.load(f)"),
        (loose_ends, "from pickle import loads"),
        (loose_ends, "try: pass\nexcept: pass"),
        (hidden_inputs, "import time"),
        (hidden_inputs, "from datetime import datetime"),
        (hidden_inputs, "random.shuffle(x)"),
        (hidden_inputs, "random.Random()"),
        (hidden_inputs, "os.environ['A']"),
        (hidden_inputs, "np.random.rand(3)"),
        (printers, "print(1)"),
    ],
)
def test_each_rule_finds_what_it_forbids(rule, source):
    assert list(rule(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["random.Random(seed)", "evaluate(x)", "loop.time()", "self.random.choice(x)"]
)
def test_the_rules_leave_honest_code_alone(source):
    tree = ast.parse(source)
    assert not [*loose_ends(tree), *hidden_inputs(tree), *printers(tree)]


def test_functions_are_short():
    ordered = sorted(length(f) for path in CODE for f in functions(TREES[path]))
    assert statistics.median(ordered) <= MEDIAN_FUNCTION
    assert ordered[int(0.95 * len(ordered))] <= P95_FUNCTION


def test_no_file_or_folder_has_a_name_that_says_nothing():
    assert not [
        name(path)
        for path in CODE
        if VAGUE_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)
    ]


def test_every_module_says_what_it_is():
    assert not [name(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]


def test_only_one_module_prints():
    product = [
        path for path in CODE if path != PRINTER and not name(path).startswith("experiments/")
    ]
    assert not complaints(product, printers)


def test_nothing_evaluates_strangers_bytes_or_swallows_errors():
    assert not complaints(CODE, loose_ends)


def test_protocol_and_arithmetic_see_no_clock_no_global_chance_no_surroundings():
    assert not complaints(
        [path for path in PURE if not BORDERS.fullmatch(name(path))], hidden_inputs
    )


def test_the_borders_are_files_that_exist():
    assert {"swarm/zmq/links.py", "swarm/dht/kademlia.py", "swarm/identity.py"} <= {
        name(path) for path in PURE if BORDERS.fullmatch(name(path))
    }


def test_nothing_is_left_to_do_and_no_code_is_commented_out():
    unfinished = re.compile(
        r"#.*\b(TODO|FIXME|XXX|HACK)\b|^\s*#\s*(def|class|import|from \w+ import|return|if .*:$)\b",
        re.M,
    )
    assert not [
        f"{name(path)}: {match[0]}"
        for path in CODE
        for match in unfinished.finditer(path.read_text())
    ]


def test_no_text_names_a_particular_machine():
    here = re.compile(r"/(home|Users|root|work|tmp/w)/[\w.]")
    texts = [
        path
        for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".ci/*")
        for path in ROOT.glob(pattern)
    ]
    texts += [*CODE, *TESTS, *(ROOT / "docs").rglob("*.md")]
    found = {
        name(path) for path in texts if path != Path(__file__) and here.search(path.read_text())
    }
    assert not found


def test_the_threat_model_names_tests_that_exist():
    named = re.findall(
        r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "threat-model.md").read_text()
    )
    assert len(named) > 10
    assert not [
        which
        for which in named
        if f"def {which[1]}(" not in (ROOT / "tests" / which[0]).read_text()
    ]


def test_there_is_nearly_as_much_test_as_code():
    def written(paths):
        return sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines())

    assert written(TESTS) >= TEST_SHARE * written(CODE)
