"""A tokenizer learned from texts: byte-level BPE, as GPT-2's, by the package `tokenizers`.

Every text can be encoded and comes back unchanged. The same texts in the same order give the same
file.
"""

from collections.abc import Iterable

from farflock.node.tokens.tokenizer import BadTokenizer

END_OF_TEXT = "<|endoftext|>"
MIN_TRAINED, MAX_TRAINED = 258, 2**20  # tokens: each byte, the end of text, and one pair


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> bytes:
    """Return a tokenizer.json with at most `vocabulary` tokens; fewer if the texts have too few
    pairs to merge. Raise `BadTokenizer` if there is no text.

    Words are cut out as GPT-2 does, and only their counts are kept. A text is cut between pieces,
    so let pieces end where lines do.
    """
    if not MIN_TRAINED <= vocabulary <= MAX_TRAINED:
        raise BadTokenizer(
            f"a vocabulary of {vocabulary} is not allowed; "
            f"choose {MIN_TRAINED} to {MAX_TRAINED:,} tokens"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(filter(None, texts), trainer)
    if fast.get_vocab_size() < MIN_TRAINED:
        raise BadTokenizer("there is nothing to learn from in these texts; name texts with words")
    return fast.to_str(pretty=True).encode() + b"\n"
