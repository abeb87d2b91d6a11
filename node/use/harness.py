"""Tasks of the lm-evaluation-harness (arXiv:2405.14782) on a model of ours, without an export.

Importing this module imports `lm_eval`. Scores are those that the harness computes through
transformers for an export in float32: texts are cut to the context and padded alike. They are
tokenized alike unless the tokenizer's file puts a token in front of each text, which no run trains
on.
"""

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from farflock.node.model import loss
from farflock.node.model.generate import Sampling, pieces, sample
from farflock.node.model.llama import Llama
from farflock.node.tokens.tokenizer import Tokenizer
from farflock.node.use.tasks import BadTask, TaskScore, scores_of, unknown_task

_MAX_BATCH = 64  # sequences at once, of a small vocabulary
_ANSWER_TOKENS = 256  # if a task does not say how many
_SEED = 0

# the texts of a context and its continuation, and the tokens of both
Scored = tuple[object, list[int], list[int]]


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A model as the harness asks it: for likelihoods of continuations, and for continuations.
    Raise `BadTask` if no token of the tokenizer ends a text."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        super().__init__()
        if tokenizer.end_of_text is None:
            raise BadTask(
                "tasks need a token that ends a text, and the model's tokenizer names none; "
                "export the model with --end-of-text, and evaluate the export"
            )
        self._model, self._tokenizer, self._end = model, tokenizer, tokenizer.end_of_text
        self._context = model.config.context

    @property
    def eot_token_id(self) -> int:
        """The end of a text, which is also in front of a text that has nothing in front."""
        return self._end

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_options: object
    ) -> list[int]:
        """Return the tokens of a text."""
        return [int(token) for token in self._tokenizer.encode(string)]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows of the context if it is longer."""
        windows = [self._windows(request.args[0]) for request in requests]
        found = iter(self._loglikelihood_tokens([each for those in windows for each in those]))
        return [sum(next(found)[0] for _ in those) for those in windows]

    def _windows(self, text: str) -> list[Scored]:
        rolling = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self._context,
            context_len=1,
        )
        return [(None, *make_disjoint_window(window)) for window in rolling]

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], **_options: object
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in nats, and whether each of its tokens
        is the likeliest one. The longest are computed first, so that memory fails early."""
        order = sorted(range(len(requests)), key=lambda place: -_length(requests[place]))
        found: dict[int, tuple[float, bool]] = {}
        while order:
            longest = min(_length(requests[order[0]]), self._context)
            at_once = loss.chunk_tokens(self._model.config.vocab_size) // longest
            batch = order[: max(1, min(_MAX_BATCH, at_once))]
            order = order[len(batch) :]
            scored = self._scored([requests[place][1:] for place in batch])
            found.update(zip(batch, scored, strict=True))
        return [found[place] for place in range(len(requests))]

    @torch.no_grad()
    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        longest = max(len(behind) for _, behind in pairs)
        if longest > self._context:
            raise BadTask(
                f"a task has an answer of {longest:,} tokens, and the model's context is "
                f"{self._context:,}; leave that task out"
            )
        wholes = [(front + behind)[-(self._context + 1) :] for front, behind in pairs]
        inputs = [torch.tensor(whole[:-1]) for whole in wholes]
        x_BL = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)  # behind: nothing sees it
        logits_BLV = self._model(x_BL.to(next(self._model.parameters()).device))
        return [
            _score(logits_BLV[row, : len(whole) - 1], whole[-len(behind) :])
            for row, (whole, (_, behind)) in enumerate(zip(wholes, pairs, strict=True))
        ]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the first stop that its task names."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, context: str, options: Mapping[str, Any]) -> str:
        wanted = normalize_gen_kwargs(dict(options), _ANSWER_TOKENS)
        tokens = min(wanted["max_gen_toks"], self._context - 1)
        front = self.tok_encode(context)[-(self._context - tokens) :] or [self.prefix_token_id]
        vocabulary = self._tokenizer.vocab_size
        drawn = sample(self._model, front, _sampling(wanted), seed=_SEED, vocabulary=vocabulary)
        kept = takewhile(lambda token: token != self._end, islice(drawn, tokens))
        text = ""
        for piece in pieces(self._tokenizer, kept):
            text += piece
            if places := [at for stop in wanted["until"] if stop and (at := text.find(stop)) >= 0]:
                return text[: min(places)]
        return text


def _length(request: Scored) -> int:
    return max(len(request[1]) + len(request[2]) - 1, 1)


def _score(logits_LV: torch.Tensor, behind: Sequence[int]) -> tuple[float, bool]:
    """Return the log-likelihood of the last tokens, and whether they are the likeliest ones."""
    those = logits_LV[len(logits_LV) - len(behind) :].float()
    targets = torch.tensor(behind, device=those.device)
    chances = F.log_softmax(those, dim=-1).gather(1, targets[:, None])
    return float(chances.sum()), bool((those.argmax(-1) == targets).all())


def _sampling(options: Mapping[str, Any]) -> Sampling:
    return Sampling(
        temperature=float(options.get("temperature") or 0.0),
        top_k=int(options.get("top_k") or 0) or None,
        top_p=float(options.get("top_p", 1.0)),
    )


def evaluate_tasks(
    model: Llama,
    tokenizer: Tokenizer,
    names: Sequence[str],
    *,
    include: Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
) -> list[TaskScore]:
    """Return the scores of the tasks of these names, from the folder `include` or the harness's
    own. Of each task the first `limit` examples are taken, with `fewshot` solved ones in front, if
    these are given. Raise `BadTask` for a name that there is not, and for a task with answers
    longer than the model's context.

    Tasks of the harness download their data; those of a folder may run code that is in it."""
    found = simple_evaluate(
        model=HarnessModel(model.eval(), tokenizer),
        tasks=list(names),
        task_manager=_tasks(names, include),
        limit=limit,
        num_fewshot=fewshot,
        log_samples=False,
        bootstrap_iters=0,
    )
    return scores_of(found["results"])


def _tasks(names: Sequence[str], include: Path | None) -> TaskManager:
    """Return the tasks that there are. To list the harness's own takes seconds, so they are left
    out if the folder has all that are wanted."""
    if include is not None:
        own = TaskManager(include_path=str(include), include_defaults=False)
        if not _lacking(own, names):
            return own
    every = TaskManager(include_path=None if include is None else str(include))
    if lacking := _lacking(every, names):
        raise unknown_task(lacking[0], every.all_tasks)
    return every


def _lacking(tasks: TaskManager, names: Sequence[str]) -> list[str]:
    return [name for name in names if not tasks.match_tasks([name])]
