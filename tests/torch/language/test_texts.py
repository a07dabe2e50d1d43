"""Texts as tokens, and perplexity."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quark.errors import InvalidValueError
from quark.torch.language.texts import Text, perplexity


def characters(text, **_):
    return {"input_ids": [ord(each) - ord("a") for each in text]}


class Counting(nn.Module):
    """Knows that each token is followed by the next number, with probability `share`; all others are alike."""

    def __init__(self, share):
        super().__init__()
        self.weight = nn.Parameter(torch.full((26, 26), (1 - share) / 25).log())
        with torch.no_grad():
            for number in range(26):
                self.weight[number, (number + 1) % 26] = torch.tensor(share).log()

    def forward(self, input_ids, use_cache):
        assert not use_cache
        return SimpleNamespace(logits=self.weight[input_ids])


def test_pieces_are_evenly_spaced(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("abcdefghijklm")
    assert [each.tolist() for each in Text(path, 2, 4).token_ids(characters)] == [[[0, 1, 2, 3]], [[8, 9, 10, 11]]]
    assert len(Text(path, None, 4).token_ids(characters)) == 3
    assert [tuple(each.shape) for each in Text(path, 5, 100).token_ids(characters)] == [(1, 13)]
    path.write_text("a")
    with pytest.raises(InvalidValueError, match=r"t\.txt' has 1 tokens: expected at least 2"):
        Text(path).token_ids(characters)


def test_perplexity():
    ids = torch.arange(12).reshape(2, 1, 6)
    assert perplexity(Counting(0.25), list(ids)) == pytest.approx(4)
    assert perplexity(Counting(1 / 26), list(ids)) == pytest.approx(26)
    wrong = torch.tensor([[3, 2, 1]])
    assert perplexity(Counting(0.25), [wrong]) == pytest.approx(25 / 0.75)
    with pytest.raises(InvalidValueError, match="no tokens"):
        perplexity(Counting(0.25), [])
