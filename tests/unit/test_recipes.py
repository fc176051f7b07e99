"""Recipes: loaders on small data in the public data sets' schemas, rewards, and settings that fit by the plan."""

from __future__ import annotations

import json
import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from commands.training.plan_report import settings_file
from recipes import command
from recipes.command import arguments_of, gpus_of, services_of, settings_of
from recipes.math.agent import calculate
from recipes.math.data import RECIPE as MATH
from recipes.math.data import evaluate as of_math
from recipes.musique.data import RECIPE as MUSIQUE
from recipes.musique.data import corpus, words_of
from recipes.musique.data import evaluate as of_musique
from recipes.musique.data import tasks as musique_tasks
from recipes.musique.retrieval import Index, application, embed_words
from recipes.recipe import FILES, METHODS, SIZES, Method, Prepared, Recipe, layers, merged
from recipes.spider.agent import accepts, query_of
from recipes.spider.data import RECIPE as SPIDER
from recipes.spider.data import evaluate as of_spider
from recipes.spider.database import rows, shown
from recipes.swe.data import RECIPE as SWE
from spangrad.errors import AgentError, GatewayError, SettingsError
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.supervisor.run_directory import RunDirectory
from trainer.capacity.architecture import read_architecture
from trainer.capacity.hardware import cluster_of
from trainer.capacity.search import CapacityPlan, best_of, candidates
from trainer.publish.publisher import GatewayRefusedError

RECIPES = {recipe.name: recipe for recipe in (MATH, SPIDER, MUSIQUE, SWE)}
MODELS = Path(__file__).parents[1] / "fixtures/models"
NODES = {("32b", "full"): 2}
"""Machines of 8 x 80 GB; one for the others."""


def prepared(recipe: Recipe, directory: Path, *words: str) -> Prepared:
    """Return what a recipe makes of its small data."""
    arguments = arguments_of(recipe, ["--tiny", *words])
    vars(arguments).update(recipe.write_small(directory))
    return recipe.prepare(arguments, directory)


def planned(values: dict[str, Any], size: str, method: Method) -> tuple[CapacityPlan, Path]:
    """Return the best plan that keeps these settings, and the model."""
    model = MODELS / f"qwen2.5-{size}-instruct"
    kept = [origin.key for origin in explain_settings(values, env={}) if origin.source != "default"]
    cluster = cluster_of("8x80", NODES.get((size, method), 1), None)
    return best_of(candidates(read_architecture(model), load_settings(values, env={}), cluster, kept)), model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
def test_recipe_settings_of_model_are_those_that_plan_writes(size: str, method: Method, request: pytest.FixtureRequest) -> None:
    """The settings are those of `spangrad plan` on 8 x 80 GB with a recipe's and a method's settings; `--write-docs` writes them."""
    *files, of_model = layers("spider", size, method)
    lines = settings_file(*planned(merged(files), size, method)).splitlines()
    written = "".join(f"{line}\n" for line in lines if not line.startswith("model = "))
    if request.config.getoption("--write-docs"):
        of_model.write_text(written)
    assert tomllib.loads(of_model.read_text()) == tomllib.loads(written)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_settings_fit_their_machines(recipe: str, size: str, method: Method) -> None:
    values = merged(layers(recipe, size, method))
    plan, _ = planned(values, size, method)
    settings = load_settings(values, env={})
    workers = settings.trainer.workers
    assert not plan.misses
    assert (plan.engines, plan.ranks) == (1 + len(settings.gateway.backends), workers.per_node * workers.nodes)
    assert plan.lora_rank == (16 if method == "lora" else 0)
    assert settings.runner.run_id == settings.trainer.run_id == recipe
    assert list(settings.engine.extra_args[-2:]) == ["--gpu-memory-utilization", "0.9"], "arguments of the engine add up"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipe_file_alone_loads_as_settings(recipe: Recipe) -> None:
    assert load_settings(file=FILES / recipe.name / "spangrad.toml", env={}).runner.run_id == recipe.name
    assert (FILES / recipe.name / "README.md").exists()


@pytest.mark.parametrize("words", [("--rows", "0"), ("--rows", "-2"), ("--steps", "0"), ("--steps", "many")])
def test_recipe_arguments_without_a_number_from_1_are_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments_of(MATH, ["--tiny", "=".join(words)])
    assert f"argument {words[0]}: {words[1]!r} is no number from 1. Give one, or leave the option out." in capsys.readouterr().err


def test_recipe_services_have_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = arguments_of(MUSIQUE, ["--model", str(tmp_path), "--size", "32b", "--method", "lora"])
    settings = load_settings(settings_of(MUSIQUE, arguments, tmp_path), env={})
    services = {service.name: service for service in services_of(MUSIQUE, tmp_path, settings, prepared(MUSIQUE, tmp_path))}
    gpus = {name: service.env["CUDA_VISIBLE_DEVICES"] for name, service in services.items() if "CUDA_VISIBLE_DEVICES" in service.env}
    assert gpus == {"retrieval": "", "engine": "0,1", "engine-1": "2,3", "train": "4,5,6,7"}
    assert "engine.port=8001" in services["engine-1"].command
    assert "retrieval" in services["run"].needs
    assert services["run"].env["RETRIEVAL_URL"].startswith("http://127.0.0.1:")
    elsewhere = prepared(MUSIQUE, tmp_path, "--retrieval", "http://search:8193")
    assert (elsewhere.services, elsewhere.env) == ((), {"RETRIEVAL_URL": "http://search:8193"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SettingsError, match="take 8 GPUs, and CUDA_VISIBLE_DEVICES names 2"):
        gpus_of(settings)
    assert gpus_of(Settings()) == [], "an engine and a trainer without ranks have what there is"


def test_recipe_engines_without_ranks_have_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = arguments_of(MATH, ["--model", str(tmp_path), "--size", "0.5b", "--set", "trainer.workers.per_node=0"])
    settings = load_settings(settings_of(MATH, arguments, tmp_path), env={})
    services = services_of(MATH, tmp_path, settings, prepared(MATH, tmp_path))
    gpus = {service.name: service.env["CUDA_VISIBLE_DEVICES"] for service in services if "CUDA_VISIBLE_DEVICES" in service.env}
    assert gpus == {"engine": "0", "train": "0", "engine-1": "1", "engine-2": "2", "engine-3": "3"}


@pytest.mark.parametrize(("words", "parser"), [(("--model", "m", "--size", "7b"), "hermes"), (("--tiny",), "words")])
def test_recipe_engine_arguments_of_the_command_line_are_added(words: tuple[str, ...], parser: str, tmp_path: Path) -> None:
    arguments = arguments_of(MATH, [*words, "--set", 'engine.extra_args=["--tool-call-parser", "other"]'])
    engine = load_settings(settings_of(MATH, arguments, tmp_path), env={}).engine
    without = load_settings(settings_of(MATH, arguments_of(MATH, [*words]), tmp_path), env={}).engine
    assert parser in without.extra_args
    assert list(engine.extra_args) == [*without.extra_args, "--tool-call-parser", "other"], "vLLM takes the last of two"


@pytest.mark.parametrize("is_refused", [False, True])
def test_recipe_run_outlives_a_gateway_that_is_started_again_and_no_refusal(
    is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [GatewayError("the gateway does not answer"), None, GatewayRefusedError("send the token") if is_refused else 1]

    class Services:
        are_ready, failed = True, ()

        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> Services:
            return self

        def __exit__(self, *_: object) -> None: ...

        def poll(self) -> None: ...

        def status(self) -> list[object]:
            return []

    class Gateway:
        def __init__(self, settings: object) -> None: ...

        def served(self, policy: str) -> int | None:
            answer = answers.pop(0)
            if isinstance(answer, GatewayError):
                raise answer
            return answer

    monkeypatch.setattr(command, "Supervisor", Services)
    monkeypatch.setattr(command, "Publisher", Gateway)
    monkeypatch.setattr(command, "services_of", lambda *_: [])
    monkeypatch.setattr(command, "_POLL_SECONDS", 0.0)
    arguments = arguments_of(MATH, ["--model", str(tmp_path), "--steps", "1"])
    with RunDirectory(tmp_path / "run") as owned:
        if is_refused:
            with pytest.raises(GatewayRefusedError, match="send the token"):
                command._serve(MATH, arguments, owned, Settings(), Prepared((), ()))
            return
        command._serve(MATH, arguments, owned, Settings(), Prepared((), ()))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["version"] == 1


def test_recipe_without_model_names_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of(MATH, [])
    assert "--model is not given. Name the directory of an instruct model, or try the recipe with --tiny." in capsys.readouterr().err


def test_recipe_without_network_names_source_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(name: str, config: str | None, split: str) -> None:
        raise ConnectionError(f"no way to {name}, {config}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    arguments = arguments_of(MATH, ["--model", str(tmp_path)])
    with pytest.raises(
        AgentError, match=r"hf:openai/gsm8k:main:train cannot be loaded, split 'train' \(ConnectionError: no way to .*main\)"
    ):
        MATH.prepare(arguments, tmp_path)


def test_math_rows_give_questions_with_numbers_and_rewards(tmp_path: Path) -> None:
    tasks = prepared(MATH, tmp_path, "--rows", "5")
    assert len(tasks.train) == len(tasks.held_out) == 5
    gold = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert tasks.train[0] == {"question": gold["question"], "answer": gold["answer"].split("#### ")[1]}
    given = {"question": "", "answer": "1200"}
    answers = ("so it is 7 . answer 1,200", "The answer is: $1200.00", "answer 12", "1200", "answer", "")
    assert [of_math(given, text) for text in answers] == [1.0, 1.0, 0.0, -0.2, -0.2, -0.2]


async def test_math_calculator_evaluates_arithmetic_only() -> None:
    assert [await calculate(text) for text in ("12 + 7", "(1,000 - 1) / 2", "-3 * 2.5", "7 // 2 % 2")] == ["19", "499.5", "-7.5", "1"]
    for text in ("1 / 0", "2 ** 9", "__import__('os')", "x", "", "'a' * 3", "(" * 5000, "9" * 400):
        assert (await calculate(text)).startswith("error : ")


def test_spider_rows_give_schema_and_rewards_by_result(tmp_path: Path) -> None:
    tasks = prepared(SPIDER, tmp_path)
    given = tasks.train[0]
    assert given["schema"] == "CREATE TABLE singer ( sid int , country text , age int )"
    (((count,),), asked) = rows(given["database"], given["query"]), given["query"]
    assert isinstance(count, int)
    queries = (asked, f"select {count}", "select -1", "select nonsense", "drop table singer", "")
    assert [of_spider(given, {"query": query}) for query in queries] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert rows(given["database"], asked) == ((count,),), "nothing changes the database"
    endless = "with recursive n(x) as (select 1 union all select x + 1 from n) select count(*) from n"
    assert (rows(given["database"], endless), shown(None), shown(())) == (None, "error", "empty")
    with pytest.raises(AgentError, match=r"singers.sqlite is not there\. Unpack Spider's own archive"):
        SPIDER.prepare(arguments_of(SPIDER, ["--tiny", "--train", str(tmp_path / "train.jsonl")]), tmp_path)


def test_spider_queries_that_write_or_find_much_are_refused(tmp_path: Path) -> None:
    database, written = tmp_path / "numbers.sqlite", tmp_path / "written.sqlite"
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript("create table number ( n int ); create table price ( p real );")
        connection.executemany("insert into number values (?)", [(number,) for number in range(400)])
        connection.executemany("insert into price values (?)", [(3,), (0.1 + 0.2,)])
        connection.commit()
    refused = (
        f"vacuum into '{written}'",
        f"attach '{written}' as other",
        "pragma user_version = 3",
        "select 1; select 2",
        "select a.n , b.n from number a , number b",
        "select randomblob(1000001)",
        "select randomblob(900000) from number",
    )
    assert [rows(database, query) for query in refused] == [None] * len(refused)
    assert not written.exists()
    assert rows(database, "select p from price") == ((0.3,), (3.0,))
    counted = "with recursive small(n) as (select 1 union all select n + 1 from small where n < 9) select max(n) from small"
    assert rows(database, counted) == ((9,),)
    assert len(rows(database, "select a.n from number a , number b limit 100000") or ()) == 100_000


def test_spider_replies_hold_queries_and_verdicts() -> None:
    assert query_of("Sure:\n```sql\nselect a\nfrom t;\n```\nDone.") == "select a from t"
    assert query_of(" select 1 ;") == "select 1"
    assert [accepts(answer) for answer in ("ok", "OK.", "**ok** it is", "okay", "wrong", "")] == [True, True, True, False, False, False]


def test_musique_rows_give_answers_corpus_and_rewards(tmp_path: Path) -> None:
    tasks = prepared(MUSIQUE, tmp_path)
    assert set(tasks.train[0]) == {"question", "answers"}, "the agent sees no paragraph"
    data = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert len(texts) == len(set(texts)) == 300
    assert corpus(data[:1]) == texts[:60]
    assert musique_tasks([{**data[0], "answerable": False}]) == []
    assert words_of("The Beatles' 1st, a hit!") == ["beatles", "1st", "hit"]
    given = {"answers": ["New York City", "NYC"]}
    answers = ("<think> x </think> <answer> the NYC </answer>", "<answer>new york</answer>", "<answer>rome</answer>", "NYC")
    assert [of_musique(given, text) for text in answers] == pytest.approx([1.0, 0.9 * 0.8 + 0.1, 0.1, 0.0])


async def test_musique_retrieval_service_gives_nearest_paragraphs() -> None:
    texts = ["the river of fuzaland is ruso", "the leader of fuzaland is mito", "a dish of kanoland"]
    async with TestClient(TestServer(application(Index(texts, embed_words)))) as client:
        assert (await client.get("/health")).status == 200
        answer = await client.post("/search", json={"query": "leader of fuzaland", "count": 2})
        assert await answer.json() == {"documents": [texts[1], texts[0]]}
