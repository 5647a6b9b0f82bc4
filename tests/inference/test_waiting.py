"""Which requests wait for others: for masks of grammars, and for a lane."""

import concurrent.futures

from test_engine import NEW, PROMPTS, SAMPLED, engine, reset, result, words

from maxmeg.inference.requests import Request


def test_a_mask_that_does_not_come_keeps_its_own_request_alone(monkeypatch):
    served, lacking, mask = engine("grouped"), [], concurrent.futures.Future()
    ruled, free = Request(NEW, SAMPLED, grammar=words()), Request(NEW, SAMPLED)
    expected, before = served.generate(PROMPTS[:1], ruled)[0], served.decode_steps
    with monkeypatch.context() as patch:
        patch.setattr(served._masks, "start", lambda matcher: lacking.append(matcher) or mask)
        late = served.submit(PROMPTS[0], ruled)
    other = served.submit(PROMPTS[1], free)
    while not other.reason:
        served.step()
    assert served.decode_steps - before == NEW - 1 and not late.tokens
    mask.set_result(lacking[0].mask())
    while served.step():
        pass
    assert result(late) == result(expected)


def test_a_slow_grammar_gives_its_lane_to_requests_that_wait(monkeypatch):
    served, ruled = engine("grouped"), Request(24, SAMPLED, grammar=words())
    expected = [served.generate([prompt], ruled)[0] for prompt in PROMPTS[:3]]
    monkeypatch.setattr("maxmeg.inference.grammar.SLOW_SECONDS", 0.0)
    scheduler = reset(served)
    replies = [served.submit(prompt, ruled) for prompt in PROMPTS[:3]]
    while len(replies[0].tokens) < 3:
        served.step()
    waiting = served.submit(PROMPTS[3], Request(2, SAMPLED))
    while not waiting.reason:
        served.step()
    assert scheduler.preemptions and not any(reply.reason for reply in replies)
    while served.step():
        pass
    assert [*map(result, replies)] == [*map(result, expected)]


def test_the_first_reply_of_a_request_goes_before_further_ones_of_others():
    served, many, one = engine("grouped"), Request(40, SAMPLED), Request(NEW, SAMPLED)
    reset(served)
    expected = [served.generate([PROMPTS[1]], one), served.generate([PROMPTS[0]] * 6, many)]
    replies = [served.submit(PROMPTS[0], many, number=number) for number in range(6)]
    for _ in range(9):
        served.step()
    first = served.submit(PROMPTS[1], one)
    while not first.reason:
        served.step()
    assert not any(reply.reason for reply in replies) and served.scheduler.preemptions
    while served.step():
        pass
    assert [result(r) for r in (first, *replies)] == [result(r) for rs in expected for r in rs]
