"""sft.py: supervised training on the model's own part of a text, and the examples that the
baselines are made of.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import sft
from data import Document, Question, load_questions, save_questions
from errors import InputError
from other_models.llm import LocalLLM
from policy import Policy, save_policy
from prompts import PROTOCOLS, build_prompt, frame_documents
from rewards import arena
from rollout import decode, encode
from sft import (
    Example,
    Reasoning,
    collate_examples,
    direct_example,
    reasoning_example,
    reasoning_from_support,
    sft_loss,
    summary_example,
    trace_example,
    trace_pieces,
    train_sft,
)
from summarizer import SummaryPair, summary_request
from trajectory import Trajectory, trajectory_from_text
from world.toy import make_model

SLICES = Path(__file__).resolve().parents[2] / "shared" / "data"

EXAMPLES = [
    Example(
        [5, 6, 7, 8, 9, 10], [0, 0, 1, 0, 0, 1]
    ),  # prompt, a model token, a document, a model token
    Example([5, 6, 11], [0, 1, 1]),
    Example([5, 12, 13, 14], [0, 0, 0, 1]),
    Example([5, 6], [0, 0]),  # nothing to imitate
]


@pytest.fixture
def policy():
    return Policy(make_model(30, seed=0))


def train(policy, examples=EXAMPLES, steps=1, **settings):
    return train_sft(policy, lambda step: examples, steps, **{"lr": 1e-2, **settings})


def test_columns_of_the_mask_are_about_the_next_token():
    tokens, mask = collate_examples(EXAMPLES[:2])
    assert tokens.tolist() == [[5, 6, 7, 8, 9, 10], [5, 6, 11, 0, 0, 0]]
    # token 2 of the first example is imitated: column 1. Padding is never imitated.
    assert mask.tolist() == [[0, 1, 0, 0, 1], [1, 1, 0, 0, 0]]


def test_the_loss_is_the_mean_over_the_tokens_to_imitate():
    # log-probs −1, −3 and −9, of which the mask takes the first two: (1 + 3) / 2 = 2
    def scripted(tokens, mask):
        return torch.tensor([[-1.0, -3.0, -9.0]])

    assert (
        sft_loss(
            scripted, torch.zeros(1, 4, dtype=torch.long), torch.tensor([[1.0, 1.0, 0.0]])
        ).item()
        == 2.0
    )


def test_the_loss_is_cross_entropy_with_ignored_labels(policy):
    tokens, mask = collate_examples(EXAMPLES)
    logits = policy.language_model(tokens).logits[:, :-1]  # [B, T, V]
    labels = tokens[:, 1:].masked_fill(mask == 0, -100)  # [B, T]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100
    )
    assert sft_loss(policy, tokens, mask).item() == pytest.approx(expected.item(), abs=1e-5)


def test_nothing_to_imitate_is_a_loss_of_zero_and_no_nan(policy):
    loss = sft_loss(policy, *collate_examples([EXAMPLES[3]]))
    loss.backward()
    assert loss.item() == 0 and all(
        p.grad is None or p.grad.eq(0).all() for p in policy.parameters()
    )


def test_however_a_batch_is_cut_the_step_and_the_loss_are_the_same():
    results = []
    for budget in (1, 6, 10_000):  # every row alone, ragged, all at once
        policy = Policy(make_model(30, seed=0))
        results.append(train(policy, EXAMPLES[:3], steps=3, lr=1e-3, tokens_per_micro_batch=budget))
    assert results[1] == pytest.approx(results[0], abs=1e-4)
    assert results[2] == pytest.approx(results[0], abs=1e-4)


def test_a_mean_of_micro_batch_means_would_be_another_loss(policy):
    # Rows with 2, 2 and 1 tokens to imitate: their plain mean weighs the last row's token as much
    # as two others.
    tokens, mask = collate_examples(EXAMPLES[:3])
    with torch.no_grad():
        whole = sft_loss(policy, tokens, mask).item()
        rows = [sft_loss(policy, tokens[i : i + 1], mask[i : i + 1]).item() for i in range(3)]
    assert (2 * rows[0] + 2 * rows[1] + rows[2]) / 5 == pytest.approx(whole, abs=1e-5)
    assert abs(sum(rows) / 3 - whole) > 1e-3


def test_it_learns_what_is_imitated_and_not_what_is_masked(policy):
    # "5 -> 6 -> 7" is imitated; "7 -> 8" is a document and stays as unlikely as it was.
    example = Example([5, 6, 7, 8], [0, 1, 1, 0])
    tokens, _ = collate_examples([example])
    with torch.no_grad():
        before = policy(tokens)[0].exp()
    losses = train(policy, [example], steps=30)
    with torch.no_grad():
        after = policy(tokens)[0].exp()
    assert losses[-1] < 0.1 < losses[0]
    assert after[0] > 0.9 and after[1] > 0.9
    assert after[2] < max(0.1, 3 * before[2])


def test_the_rate_warms_up_stays_and_falls_to_zero(policy, monkeypatch):
    # 10 steps, 2 of warm-up, decay from 60 %: 1/2, 1, 1, 1, 1, 1, then 1 − k/4 for k = 0 .. 3
    rates = []

    def recording(*arguments):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        optimizer.step = lambda: rates.append(optimizer.param_groups[0]["lr"])
        return optimizer

    monkeypatch.setattr(sft, "make_optimizer", recording)
    train(policy, steps=10, lr=1.0, warmup=2, decay_from=0.6)
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_every_step_asks_for_its_own_batch(policy):
    asked = []

    def next_examples(step):
        asked.append(step)
        return EXAMPLES[:2]

    assert len(train_sft(policy, next_examples, 3, lr=1e-3)) == 3
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_row_without_anything_to_imitate_harms_no_step(policy, budget):
    losses = train(policy, EXAMPLES, steps=2, tokens_per_micro_batch=budget)
    assert losses[0] > 0 and all(p.isfinite().all() for p in policy.parameters())


# ----------------------------------------------------------------------------- direct and reasoning

REFERENCES = (
    Document("a", "Ana Bell", "Ana Bell is a painter. She was born in Kelmouth. She lives abroad."),
    Document("b", "Tidewerk", "Tidewerk builds lanterns."),
    Document("c", "", "Kelmouth is old. Kelmouth is a town in Norland!"),
)
PLAIN = Question("q1", "In which country was Ana Bell born?", ["Norland", "the Norland"])
QUESTION = replace(PLAIN, references=REFERENCES, supporting=(1, 3))


def imitated(example, tokenizer):
    return decode(tokenizer, [i for i, m in zip(example.ids, example.mask, strict=True) if m])


def read_only(example, tokenizer):
    return decode(tokenizer, [i for i, m in zip(example.ids, example.mask, strict=True) if not m])


def message(call, *args, **kwargs):
    with pytest.raises(InputError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "protocol, expected",
    [
        ("arena", "<answer> Norland </answer><|im_end|>"),
        ("ur2", "\\boxed{Norland}<|im_end|>"),
        (
            "r1_searcher",
            "</think><answer> Norland </answer><|im_end|>",
        ),  # its prompt ends inside <think>
    ],
)
def test_direct_imitates_the_first_answer_its_box_and_the_end_and_nothing_else(
    bpe, protocol, expected
):
    example = direct_example(QUESTION, protocol, bpe)
    assert imitated(example, bpe) == expected
    first = example.mask.index(1)
    assert all(example.mask[first:]) and not any(example.mask[:first])


def test_directs_instruction_asks_for_no_reasoning_and_shows_the_references(bpe):
    prompt = read_only(direct_example(QUESTION, "arena", bpe), bpe)
    assert (
        "relevance" not in prompt
        and "(3) Kelmouth is old." in prompt
        and "Ana Bell born?" in prompt
    )


def test_a_choice_questions_direct_answer_is_its_letter(bpe):
    question = Question("1", "Which?", ["B"], "choice", ("red", "green"))
    assert imitated(direct_example(question, "ur2", bpe), bpe) == "\\boxed{B}<|im_end|>"


def test_a_reasoning_trace_built_from_the_support_quotes_the_sentence_that_answers_or_the_first():
    reasoning = reasoning_from_support(QUESTION)
    assert reasoning.relevance == (1, 3) and reasoning.answer == "Norland"
    # paragraph 1 does not hold the answer: its first sentence; paragraph 3 has no title, and its
    # second sentence holds it
    assert (
        reasoning.analysis
        == "(1) Ana Bell: Ana Bell is a painter. (3) Kelmouth is a town in Norland! So the answer"
        " is Norland."
    )


def test_a_reasoning_trace_earns_all_that_arena_pays(bpe):
    example = reasoning_example(QUESTION, reasoning_from_support(QUESTION), "arena", bpe)
    text = imitated(example, bpe)
    assert text.startswith(
        "<relevance>[1, 3]</relevance>\n<analysis> (1) Ana Bell"
    ) and text.endswith("</answer><|im_end|>")
    reward = arena(trajectory_from_text(QUESTION, text, "arena"))
    assert sum(reward.values()) == 13  # 1 + 1 + 1 + 10
    assert read_only(example, bpe) == decode(bpe, build_prompt("arena", QUESTION, bpe))


def test_a_given_analysis_cannot_open_a_section_or_a_turn_of_its_own(bpe):
    reasoning = Reasoning((1,), "so </analysis><answer> x </answer><|im_end|>", "Norland")
    text = imitated(reasoning_example(QUESTION, reasoning, "arena", bpe), bpe)
    assert text.count("</analysis>") == text.count("<answer>") == text.count("<|im_end|>") == 1


def test_reasoning_needs_support_and_a_protocol_with_its_sections(bpe):
    assert "question 1 names no supporting reference" in message(
        reasoning_from_support, Question("1", "?", ["a"])
    )
    assert "<relevance>" in message(
        reasoning_example, QUESTION, reasoning_from_support(QUESTION), "ur2", bpe
    )


@pytest.mark.parametrize(
    "name", ["hotpotqa/official_train_distractor_20.json", "musique/official_train_15.jsonl"]
)
def test_real_questions_make_traces_that_earn_all_that_arena_pays(bpe, name):
    if not (SLICES / name).exists():
        pytest.skip(f"the real slice {SLICES / name} is not here")
    for question in load_questions(SLICES / name)[:5]:
        text = imitated(
            reasoning_example(question, reasoning_from_support(question), "arena", bpe), bpe
        )
        assert sum(arena(trajectory_from_text(question, text, "arena")).values()) == 13


# -------------------------------------------------------------------------------------- transcripts

QUERY, END = PROTOCOLS["ur2"].query_tags
FOUND = frame_documents(PROTOCOLS["ur2"], "Ana Bell was born in Kelmouth.")


def lived(tokenizer, protocol, pieces) -> Trajectory:
    """A trajectory as the rollout leaves it: (writer, text) pieces, each encoded by itself."""
    trajectory = Trajectory(PLAIN, PROTOCOLS[protocol], build_prompt(protocol, PLAIN, tokenizer))
    for writer, text in pieces:
        ids = encode(tokenizer, text)
        if writer == "model":
            trajectory.append_model(ids, [0.0] * len(ids), text)
        else:
            trajectory.append_environment(ids, text, writer)
    return trajectory


LIVES = {
    "a search": (
        "ur2",
        [
            ("model", f"First.{QUERY} Ana Bell {END}"),
            ("documents", FOUND),
            ("model", "So \\boxed{5}.<|im_end|>"),
        ],
    ),
    "a turn that ends in newlines of its own": (
        "ur2",
        [
            ("model", f"{QUERY} Ana Bell {END}\n\n"),
            ("documents", FOUND),
            ("model", "\n\\boxed{5}<|im_end|>"),
        ],
    ),
    "a fallback and its notice": (
        "ur2",
        [
            ("model", f"{QUERY} 1 + 1 {END}"),
            ("documents", frame_documents(PROTOCOLS["ur2"], "None")),
            ("notice", PROTOCOLS["ur2"].fallback_notice),
            ("model", "\\boxed{2}<|im_end|>"),
        ],
    ),
    "a refused query": (
        "ur2",
        [
            ("model", f"{QUERY} {END}\n\n"),
            ("notice", PROTOCOLS["ur2"].malformed_notice),
            ("model", "\\boxed{2}<|im_end|>"),
        ],
    ),
    "the limit": (
        "r1_searcher",
        [
            ("model", f"{QUERY} Ana Bell {END}"),
            ("documents", FOUND),
            ("model", f"{QUERY} Kelmouth {END}"),
            ("notice", PROTOCOLS["ur2"].limit_notice),
            ("model", "</think> <answer> Norland </answer>"),
        ],
    ),
}


@pytest.mark.parametrize("life", LIVES)
def test_a_transcript_is_encoded_and_masked_as_it_was_lived(bpe, life):
    protocol, pieces = LIVES[life]
    trajectory = lived(bpe, protocol, pieces)
    example = trace_example(trajectory_from_text(PLAIN, trajectory.text, protocol), bpe)
    ended = trajectory.response_ids[-1] == bpe.eos_token_id
    end = (
        [] if ended else [bpe.eos_token_id]
    )  # a rollout stops at </answer>; the example teaches to stop
    assert example.ids == trajectory.ids + end
    assert example.mask == [0] * len(trajectory.prompt_ids) + trajectory.response_mask + [1] * len(
        end
    )


def test_no_token_spans_a_turns_end_and_the_block_behind_it(bpe):
    # Encoded as one text, ">" and the block's newlines are one token in this tokenizer.
    _, pieces = LIVES["a search"]
    whole = encode(bpe, "".join(text for _, text in pieces))
    example = trace_example(
        trajectory_from_text(PLAIN, "".join(text for _, text in pieces), "ur2"), bpe
    )
    assert example.ids[-len(whole) :] != whole


def test_a_block_that_the_model_wrote_itself_is_its_own():
    text = f"{FOUND}\\boxed{{5}}"  # no query stands before it
    assert trace_pieces(trajectory_from_text(PLAIN, text, "ur2")) == [(text, True)]


def record(name="q1", sample=0, em=1, form=1, **changes):
    return {
        "id": name,
        "sample": sample,
        "question": PLAIN.question,
        "golds": ["Norland"],
        "prediction": "Norland",
        "transcript": f"{sample}{QUERY} Ana Bell {END}{FOUND}</think> <answer> Norland </answer>",
        "metrics": {"em": em, "f1": em, "format": form},
        **changes,
    }


@pytest.fixture
def write(tmp_path):
    def write(*records, name="records.jsonl"):
        path = tmp_path / name
        path.write_text(
            "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
        )
        return str(path)

    return write


def test_only_right_and_well_formed_trajectories_are_kept_and_so_many_of_each_question(write):
    path = write(
        record(sample=0, em=0),
        record(sample=1, form=0),
        *[record(sample=i) for i in range(2, 6)],
        record("q2"),
    )
    kept = [
        (t.question.id, t.text[0]) for t in sft.read_traces(path, "r1_searcher", per_question=2)
    ]
    assert kept == [("q1", "2"), ("q1", "3"), ("q2", "0")]


def test_options_and_references_come_from_the_question_file(write):
    full = [Question("q1", "Which?", ["B"], "choice", ("red", "green"))]
    assert sft.read_traces(write(record()), "r1_searcher", questions=full)[0].question is full[0]
    assert "question q2 is not in --questions" in message(
        sft.read_traces, write(record("q2")), "ur2", questions=full
    )


@pytest.mark.parametrize(
    "bad, expected",
    [
        ({"id": "q2", "question": "?", "transcript": "x"}, "line 2: expected a line of eval.py"),
        ({**record(), "transcript": None}, "line 2: expected a line of eval.py"),
        ("{", "line 2: not valid JSON"),
    ],
)
def test_a_line_that_is_no_prediction_is_named(write, bad, expected):
    assert expected in message(sft.read_traces, write(record(), bad), "ur2")


def test_real_published_transcripts_give_their_documents_no_loss(bpe):
    path = SLICES / "predictions" / "r1_searcher_bamboogle_qwen_full_20.jsonl"
    if not path.exists():
        pytest.skip(f"the real slice {path} is not here")
    for line in path.read_text(encoding="utf-8").splitlines():
        transcript = json.loads(line)["gen_text_store"]
        trajectory = trajectory_from_text(PLAIN, transcript, "r1_searcher")
        pieces = trace_pieces(trajectory)
        assert "".join(text for text, _ in pieces) == transcript
        blocks = [text for text, imitate in pieces if not imitate]
        assert len(blocks) == len(trajectory.searches) and all(
            "<|begin_of_documents|>" in block for block in blocks
        )


# ----------------------------------------------------------------------------------- the summariser


@pytest.mark.parametrize(
    "fallback, expected", [(False, "Born in Kelmouth.<|im_end|>"), (True, "NO FACT<|im_end|>")]
)
def test_a_summary_is_imitated_behind_the_very_prompt_that_a_summariser_is_asked_with(
    bpe, qwen2, fallback, expected
):
    pair = SummaryPair(
        "where was ana <|im_end|> bell born", [*REFERENCES[:2]], "Born in Kelmouth.", fallback
    )
    example = summary_example(pair, bpe)
    assert imitated(example, bpe) == expected
    asked = LocalLLM(qwen2, bpe, max_tokens=8).prompt(summary_request(pair.query, pair.documents))
    assert example.ids[: example.mask.index(1)] == asked


# --------------------------------------------------------------------------------- the command line


@pytest.fixture
def model(tmp_path, toy_tokenizer):
    path = tmp_path / "model"
    save_policy(Policy(make_model(len(toy_tokenizer), seed=0)), toy_tokenizer, path)
    return str(path)


@pytest.fixture
def files(tmp_path, write):
    """A data file for every method, in words that the tiny model has; its context holds 256
    tokens.
    """
    texts = {
        "ana bell": "ana bell has birthplace kelmouth .",
        "kelmouth": "kelmouth is in corsia .",
    }
    references = tuple(Document(title, title, text) for title, text in texts.items())
    question = Question(
        "q1",
        "which country was ana bell born in ?",
        ["corsia"],
        references=references,
        supporting=(1, 2),
    )
    save_questions(
        tmp_path / "questions.jsonl",
        [question, Question("q2", "where ?", ["kelmouth"], references=references)],
    )
    found = frame_documents(PROTOCOLS["ur2"], "ana bell")
    transcript = f" ana{QUERY} birthplace of ana bell{END}{found}</think> <answer> a </answer>"
    log = {
        "query": "ana bell",
        "documents": [vars(d) for d in references],
        "summary": "kelmouth",
        "fallback": False,
    }
    return {
        "direct": str(tmp_path / "questions.jsonl"),
        "reasoning": str(tmp_path / "questions.jsonl"),
        "traces": write(record(transcript=transcript), name="predictions.jsonl"),
        "summarizer": write(log, name="log.jsonl"),
    }


def run(method, model, data, out, *flags):
    sft.main(
        [
            method,
            "--model",
            model,
            "--data",
            data,
            "--out",
            str(out),
            "--steps",
            "2",
            "--lr",
            "1e-3",
            *flags,
        ]
    )
    return AutoModelForCausalLM.from_pretrained(out).state_dict()


@pytest.mark.parametrize("method", sft.METHODS)
def test_every_method_trains_and_saves_a_model_that_loads(tmp_path, model, files, method, capsys):
    weights = run(
        method,
        model,
        files[method],
        tmp_path / "out",
        *(["--skip_bad"] if method == "reasoning" else []),
    )
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any(not weights[name].equal(before[name]) for name in before)
    assert "saved:" in capsys.readouterr().out
    assert (tmp_path / "out" / "prompt.txt").exists() == (method == "direct")


def test_equal_seeds_give_equal_weights_and_others_do_not(tmp_path, model, files):
    flags = ["--batch_size", "1"]
    first, again = (
        run("direct", model, files["direct"], tmp_path / name, *flags) for name in ("a", "b")
    )
    assert all(first[name].equal(again[name]) for name in first)
    others = [
        run("direct", model, files["direct"], tmp_path / f"s{seed}", *flags, "--seed", str(seed))
        for seed in (1, 2, 3)
    ]
    assert any(not first[name].equal(other[name]) for other in others for name in first)


def test_given_reasoning_traces_take_the_place_of_built_ones(tmp_path, model, files, write, capsys):
    traces = write(
        {"id": "q2", "relevance": [2], "analysis": "kelmouth", "answer": "kelmouth"},
        name="traces.jsonl",
    )
    run("reasoning", model, files["reasoning"], tmp_path / "out", "--traces", traces)
    assert "reasoning: 1 examples" in capsys.readouterr().out


@pytest.mark.parametrize(
    "trace, expected",
    [
        (
            {"id": "q2", "relevance": [3], "analysis": "x", "answer": "y"},
            "question q2 cites 3; its references are 1 to 2",
        ),
        ({"id": "q2", "relevance": [], "analysis": "x", "answer": "y"}, "line 1: expected"),
        ({"id": "q2", "relevance": [1], "analysis": " ", "answer": "y"}, "line 1: expected"),
        ({"id": "q9", "relevance": [1], "analysis": "x", "answer": "y"}, "no example to train on"),
    ],
)
def test_a_trace_that_cannot_be_is_named(tmp_path, model, files, write, trace, expected):
    traces = write(trace, name="traces.jsonl")
    assert expected in message(
        run, "reasoning", model, files["reasoning"], tmp_path / "out", "--traces", traces
    )


def test_examples_beyond_the_context_are_left_out_and_counted_and_not_cut(
    tmp_path, model, files, write, capsys
):
    long = record("q2", transcript="ana " * 300)
    run(
        "traces",
        model,
        write(json.loads(Path(files["traces"]).read_text()), long),
        tmp_path / "out",
    )
    assert "1 of 2 examples are longer than 256 tokens" in capsys.readouterr().out
    assert "no example to train on" in message(run, "traces", model, write(long), tmp_path / "out2")


def test_a_model_that_burst_is_not_saved(tmp_path, model, files, monkeypatch):
    monkeypatch.setattr(sft, "train_sft", lambda *a, **k: [1.0, float("nan")])
    assert "nothing was saved; lower --lr" in message(
        run, "direct", model, files["direct"], tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["distil"], "sft.py distil: unknown; one of direct, reasoning, traces, summarizer"),
        (["direct", "--data", "x", "--out", "y"], "--model is missing"),
        (["direct", "--model", "m", "--data", "x", "--out", "."], "--out . is there already"),
        (["direct", "--model", "m", "--data", "x", "--out", "y", "--lr", "0"], "--lr 0.0"),
        (
            ["direct", "--model", "m", "--data", "x", "--out", "y", "--epochs", "inf"],
            "--epochs inf",
        ),
        (
            ["direct", "--model", "m", "--data", "x", "--out", "y", "--batch_size", "0"],
            "--batch_size 0",
        ),
        (
            ["direct", "--model", "m", "--data", "x", "--out", "y", "--protocol", "ur3"],
            "unknown protocol 'ur3'",
        ),
        (
            ["direct", "--model", "m", "--data", "x", "--out", "y", "--lrr", "1"],
            "unknown flag --lrr",
        ),
        (["direct", "--model", "/nowhere", "--data", "x", "--out", "y"], "--model /nowhere"),
    ],
)
def test_flags_that_cannot_be_are_one_line(arguments, expected):
    assert expected in message(sft.main, arguments)


def test_an_interrupt_saves_nothing_and_says_so(tmp_path, model, files, monkeypatch, capsys):
    def interrupted(*_arguments, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(sft, "train_sft", interrupted)
    with pytest.raises(SystemExit) as end:
        run("direct", model, files["direct"], tmp_path / "out")
    assert (
        end.value.code == 130
        and "nothing was saved" in capsys.readouterr().out
        and not (tmp_path / "out").exists()
    )


def test_python_sft_shows_whose_words_are_imitated(capsys):
    sft.main([])
    shown = capsys.readouterr().out
    assert "5, 6, 7, 8" in shown
    assert (
        "0  '\\n\\n<|begin_of_documents|>" in shown
        and "1  '</think><answer> Norland </answer>'" in shown
    )
