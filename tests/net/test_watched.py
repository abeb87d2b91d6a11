"""Real nodes are watched: the same measures are in CSV, in TensorBoard's files, at Prometheus, and
one evaluation is the same for all members."""

import re
import urllib.request

import pytest
from worlds.node_processes import STEP, described
from worlds.waiting import until_real

from farflock.node.run.manifest import resolve
from farflock.node.sinks.csv_file import FILE, read_measures
from farflock.node.sinks.measures import numbers, prometheus_name

pytestmark = pytest.mark.net

pytest.importorskip("tensorboard", reason="pip install -c constraints.txt -e '.[tensorboard]'")

STEP_S = 0.05  # no machine may end a run before it was watched
WATCHED = ("--metrics", "0", "--log", "tensorboard", "--log-every", "1")
WHOLE = resolve(
    {
        "run": {"name": "watched", "total_tokens": 100_000 * 4 * 32},
        "model": {"preset": "tiny"},
        "train": {"batch": 4, "seq": 32},
        "method": {"name": "diloco", "options": {"period": 5}},
        "exchange": {"view_s": 2.0, "deadline_s": 6.0, "start_peers": 2},
        "evaluation": {"every": 10**6, "sequences": 32},
    }
)


def served(node):
    """What Prometheus sees of a node, by name, once the node has a loss and knows an evaluation."""
    from prometheus_client.parser import text_string_to_metric_families

    def fetched():
        found = re.findall(r"http://\S+/metrics", node.log)
        if not found:
            return None
        with urllib.request.urlopen(found[-1], timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            samples = {each.name: each.value for family in families for each in family.samples}
        wanted = prometheus_name("loss"), prometheus_name("evaluation_loss")
        return samples if samples.keys() >= set(wanted) else None

    return until_real(fetched, "measures at Prometheus", node.told)


def drawn(node):
    """The newest scalars of a node for TensorBoard, and their step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (node.folder / "tensorboard").iterdir()
    seen = EventAccumulator(str(folder))
    seen.Reload()
    newest = {tag: seen.Scalars(tag)[-1] for tag in seen.Tags()["scalars"]}
    return {tag: each.value for tag, each in newest.items()}, newest["tokens"].step


def agree(node, samples):
    """Check that a node that has ended says the same everywhere."""
    rows = read_measures(node.folder)
    (then,) = [row for row in rows if row.time_s == samples[prometheus_name("time_s")]]
    expected = {"time_s": then.time_s, "step": then.step, **numbers(then)}
    assert samples == {prometheus_name(name): value for name, value in expected.items()}
    values, step = drawn(node)
    assert step == rows[-1].step
    assert values == {name: pytest.approx(value) for name, value in numbers(rows[-1]).items()}
    return rows


def evaluated(values):
    """What measures say of the newest evaluation."""
    return {name: value for name, value in values.items() if "evaluation" in name}


def test_whole_replicas_say_the_same_everywhere_and_a_full_disk_stops_none(run):
    run.brake(STEP_S)
    (run.folder / "run.toml").write_bytes(WHOLE.canonical())
    founder = run.start("founder", "run", run.folder / "run.toml", *WATCHED)
    run.invite = founder.reaches(lambda status: status["invite"])["invite"]
    (run.folder / "full").mkdir()
    (run.folder / "full" / FILE).symlink_to("/dev/full")
    joiner, full = run.join("joiner", *WATCHED), run.join("full", *WATCHED)
    nodes = founder, joiner, full
    joiner.reaches(lambda status: status["rounds"].get("ok", 0) > 1)
    full.reaches(lambda status: status["evaluation"] and status["step"] > 20)
    samples = [served(node) for node in nodes]
    assert samples[0][prometheus_name("peers")] >= 2

    said = [node.status()["evaluation"] for node in nodes]
    assert [each["round"] for each in said] == [0, 0, 0]
    assert said[0]["loss"] == said[1]["loss"] == said[2]["loss"]
    assert evaluated(samples[0]) == evaluated(samples[1]) == evaluated(samples[2])
    assert samples[0][prometheus_name("evaluation_loss")] == said[0]["loss"]

    for node in nodes:
        node.leaves()
    rows = agree(founder, samples[0])
    assert rows[-1].rounds_ok > 0
    assert evaluated(numbers(rows[-1])) == evaluated(numbers(agree(joiner, samples[1])[-1]))
    drawn_there = {name: pytest.approx(x) for name, x in evaluated(numbers(rows[-1])).items()}
    assert evaluated(drawn(full)[0]) == drawn_there
    assert full.log.count(f"{FILE} does not get all measures, training goes on: ") == 1
    assert "No space left on device" in full.log


@pytest.mark.ci_more
def test_a_pipeline_s_node_says_the_same_everywhere(run):
    run.brake(STEP_S)
    (run.folder / "run.toml").write_bytes(described(1, 10**5).canonical())
    node = run.start("node", "run", run.folder / "run.toml", "--role", "replica", *WATCHED)
    node.reaches(lambda status: status["tokens"] > 2 * STEP)
    samples = served(node)
    node.leaves()
    assert agree(node, samples)[-1].tokens > 2 * STEP
