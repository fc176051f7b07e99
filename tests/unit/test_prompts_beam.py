"""Laws of the beam: it ends, it never gets worse, it measures nothing twice, and it goes on from whatever is known."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.beam import Done, EditPosition, Expand, MeasureVersions, Round, next_step
from prompts.compare import gain
from spangrad.settings import PromptSettings

SIZES = st.builds(PromptSettings, rounds=st.integers(1, 4), beam_width=st.integers(1, 3), branch=st.integers(1, 3))


def play(size: PromptSettings, seed: int, forgets: bool) -> tuple[Done, list[int], dict[int, float | None]]:
    """A whole search over made-up prompts; the order of what was measured, and the scores. `forgets`: only half of each step is done."""
    chance = random.Random(seed)
    edits: dict[EditPosition, int | None] = {}
    scores: dict[int, float | None] = {}
    measured: list[int] = []
    newest = 1
    while True:
        match next_step(1, size, edits, scores):
            case Expand(places):
                assert not set(places) & set(edits)
                for place in places[: (len(places) + 1) // 2] if forgets else places:
                    edits[place] = chance.choice([None, chance.randint(1, newest), newest + 1])
                    newest = max(newest, edits[place] or 0)
            case MeasureVersions(_, versions):
                for version in versions[: (len(versions) + 1) // 2] if forgets else versions:
                    measured.append(version)
                    scores[version] = None if version > 1 and chance.random() < 0.2 else round(chance.random(), 1)
            case done:
                return done, measured, scores


@settings(deadline=None)
@given(SIZES, st.integers(0, 2**32), st.booleans())
def test_next_step_measures_every_candidate_once_and_never_gets_worse(size: PromptSettings, seed: int, forgets: bool) -> None:
    done, measured, scores = play(size, seed, forgets)
    assert len(measured) == len(set(measured))
    assert set(measured) == set(done.entered)
    assert [search_round.number for search_round in done.rounds] == list(range(size.rounds + 1))
    best = [scores[search_round.beam[0]] for search_round in done.rounds]
    assert all(after is not None and before is not None and after >= before for before, after in pairwise(best))
    assert best[-1] == max(score for score in scores.values() if score is not None)
    for search_round in done.rounds:
        assert 1 <= len(search_round.beam) <= size.beam_width
        assert [scores[version] for version in search_round.beam] == sorted(
            (scores[version] or 0.0 for version in search_round.beam), reverse=True
        )


def test_next_step_keeps_older_of_equals_and_ignores_edit_to_known_text() -> None:
    edits = {EditPosition(1, 7, 0): 9, EditPosition(1, 7, 1): 3, EditPosition(1, 7, 2): 7}
    scores = {7: 0.5, 9: 0.5, 3: 0.5}
    size = PromptSettings(rounds=1, beam_width=2, branch=3)
    assert next_step(7, size, edits, scores) == Done((Round(0, (7,)), Round(1, (7, 9))), (7, 9, 3))
    assert next_step(7, size, edits, {7: 0.5, 9: None}) == MeasureVersions(1, (3,))
    # A longer search of the same question goes on where a shorter one ended.
    longer = PromptSettings(rounds=2, beam_width=1, branch=3)
    assert next_step(7, longer, edits, scores) == Expand(tuple(EditPosition(2, 7, number) for number in range(3)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=1, max_size=20))
def test_gain_is_mean_difference_and_one_sided_p(pairs: list[tuple[int, int]]) -> None:
    base, candidate = ({str(i): float(pair[side]) for i, pair in enumerate(pairs)} for side in (0, 1))
    there, back = gain(base, candidate, 0), gain(candidate, base, 0)
    assert there.mean == -back.mean
    assert abs(there.mean - sum(b - a for a, b in pairs) / len(pairs)) < 1e-9
    assert 0 < there.p <= 1
    assert there.p + back.p >= 1
    assert gain(base, base, 0).p == 1


def test_gain_p_of_certain_gain_is_share_of_sign_assignments() -> None:
    assert gain(dict.fromkeys("abcdef", 0.0), dict.fromkeys("abcdef", 1.0), 0).p == 1 / 64
    assert gain({"a": 0.0, "b": 0.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0}, 0).p == 0.5
    many = [f"task {i}" for i in range(40)]
    assert gain(dict.fromkeys(many, 0.0), dict.fromkeys(many, 1.0), 0).p < 1e-3
