"""Whole exports are uploaded in one commit, privately, with a token that no command line shows."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from farflock.node.model.export import ExportForm, export
from farflock.node.model.llama import PRESETS, build
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.use.hub import PushRefused, exported_files, push, require_repository

TINY = PRESETS["tiny"]


@pytest.fixture(params=["whole", "shards"])
def folder(request, tmp_path):
    form = ExportForm("bfloat16", 20_000 if request.param == "shards" else 10**9)
    weights = build(TINY, 0).state_dict()
    export(tmp_path / "out", TINY, weights, ByteTokenizer(), "# card\n", form=form)
    return tmp_path / "out"


def test_the_files_of_an_export_and_no_others_are_listed(folder):
    expected = sorted(path.name for path in folder.iterdir())
    (folder / "notes.txt").write_text("mine")
    (folder / ".env").write_text("SECRET=1")
    (folder / "checkpoints").mkdir()
    files = exported_files(folder)
    assert [each.path.name for each in files] == expected
    assert all(each.size_bytes == each.path.stat().st_size for each in files)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "weights"])
def test_a_folder_that_lacks_a_file_is_refused(folder, name):
    path = next(folder.glob("*.safetensors")) if name == "weights" else folder / name
    path.unlink()
    with pytest.raises(PushRefused, match=f"lacks {path.name}, so it is no whole export"):
        exported_files(folder)


def test_a_folder_that_is_none_and_a_broken_index_are_refused(folder):
    with pytest.raises(PushRefused, match=r"cannot be read .*make it with `farflock export`"):
        exported_files(folder / "nothing")
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_bytes(b"[" * 100_000)
    with pytest.raises(PushRefused, match=r"index.json cannot be read"):
        exported_files(folder)


@pytest.mark.parametrize("name", ["model", "a/b/c", "a/..", "../b", "a/b?x", "", "a/ b", "a/b--c"])
def test_a_name_that_is_no_repository_is_refused(name):
    with pytest.raises(PushRefused, match="write it as organisation/model"):
        require_repository(name)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a commit of small files takes; `server` keeps what it was sent."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        if self.server.status != 200:
            return self.answer({"error": "no"}, self.server.status)
        if self.path.endswith("/repos/create"):
            return self.answer({"url": f"{self.server.address}/org/model"})
        if "/preupload/" in self.path:
            files = [{"path": each["path"]} for each in json.loads(body)["files"]]
            return self.answer(
                {
                    "files": [
                        file | {"uploadMode": "regular", "shouldIgnore": False} for file in files
                    ]
                }
            )
        return self.answer(
            {"commitUrl": f"{self.server.address}/c/1", "commitOid": "1", "ok": True}
        )

    def answer(self, said, status=200):
        raw = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args):
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine, and a client that knows it."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    server = HTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.status = [], 200
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.api = huggingface_hub.HfApi(endpoint=server.address)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("public", [False, True])
def test_files_arrive_in_one_commit_of_a_private_repository(hub, folder, public):
    address = push(exported_files(folder), "org/model", public=public, api=hub.api)
    assert address == f"{hub.address}/c/1"
    assert {token for _, token, _ in hub.seen} == {"Bearer hf_secret"}
    made = json.loads(next(body for path, _, body in hub.seen if path.endswith("/repos/create")))
    assert (made["name"], made["organization"]) == ("model", "org")
    hidden = made.get("private") is True or made.get("visibility") == "private"
    assert hidden is not public
    commits = [body for path, _, body in hub.seen if "/commit/" in path]
    assert len(commits) == 1
    lines = [json.loads(line) for line in commits[0].splitlines()]
    sent = [line["value"]["path"] for line in lines if line["key"] == "file"]
    assert sorted(sent) == sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "does not let this token write"), (403, "HF_TOKEN"), (422, "422")]
)
def test_a_refusal_is_said_in_words(hub, folder, status, reason):
    hub.status = status
    with pytest.raises(PushRefused, match=reason):
        push(exported_files(folder), "org/model", api=hub.api)


def test_a_hub_that_cannot_be_reached_is_said_in_words(hub, folder):
    hub.api.endpoint = "http://127.0.0.1:1"
    with pytest.raises(PushRefused, match=r"the upload to org/model failed .*check the network"):
        push(exported_files(folder), "org/model", api=hub.api)


def test_without_a_token_the_remedy_is_said(hub, folder, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(PushRefused, match="no token for the hub; run `hf auth login`"):
        push(exported_files(folder), "org/model", api=hub.api)
    assert not hub.seen
