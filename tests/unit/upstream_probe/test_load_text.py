"""Reading load out of what engines expose, on texts of real engines and on the shapes of older ones."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.records import EngineKind, LoadSample
from gateway.upstream.load_text import parse_loads, parse_metrics, parse_old_loads, parse_ranks, read_series

ENGINES = Path(__file__).parents[2] / "golden" / "engines"


def text_of(engine: str) -> bytes:
    return (ENGINES / engine / "metrics.txt").read_bytes()


def test_vllm_under_load() -> None:
    sample = parse_metrics(text_of("vllm-0.32.0"), EngineKind.VLLM)
    assert (sample.running, sample.waiting) == (16, 8)
    assert sample.kv_usage == pytest.approx(0.7244094)
    assert (sample.prefix_queries, sample.prefix_hits) == (26305, 11616)
    assert sample.kv_blocks == 128
    assert sample.start_time_unix == pytest.approx(1.79596383357e9)


def test_older_vllm_under_load() -> None:
    sample = parse_metrics(text_of("vllm-0.16.0"), EngineKind.VLLM)
    assert (sample.running, sample.waiting, sample.kv_blocks) == (16, 3, 128)


def test_sglang() -> None:
    sample = parse_metrics(text_of("sglang-0.5.23"), EngineKind.SGLANG)
    assert (sample.running, sample.waiting) == (0, 0)
    assert sample.kv_usage == 0.05
    assert (sample.prefix_queries, sample.prefix_hits) == (19106 + 2820, 7408)
    assert sample.kv_blocks == 512
    assert sample.start_time_unix is None


@pytest.mark.parametrize("engine", ["vllm-0.32.0", "sglang-0.5.23"])
def test_an_engine_not_named_is_recognised_by_its_metrics(engine: str) -> None:
    kind = EngineKind.VLLM if engine.startswith("vllm") else EngineKind.SGLANG
    assert parse_metrics(text_of(engine), EngineKind.UNKNOWN) == parse_metrics(text_of(engine), kind)


@pytest.mark.parametrize("engine", ["vllm-0.32.0", "vllm-0.16.0", "sglang-0.5.23"])
def test_every_series_reads_as_the_reference_parser_reads_it(engine: str) -> None:
    text = text_of(engine)
    expected: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if math.isfinite(sample.value):
                expected.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    assert len(expected) > 100
    for name, samples in expected.items():
        assert [(dict(found.labels), found.value) for found in read_series(text, name)] == samples


def test_names_that_only_start_alike_and_comments_are_no_samples() -> None:
    text = b'# HELP a:b a:b 3\n# TYPE a:b gauge\na:b_total 5\na:bc{x="1"} 6\nxa:b 7\na:b 8\n'
    assert [series.value for series in read_series(text, "a:b")] == [8]


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        (b"m 1", {}, 1.0),
        (b"m\t2 1700000000000", {}, 2.0),
        (b'm{a="x"} 3', {"a": "x"}, 3.0),
        (b'm{a="}{ m 9",b="q\\"\\\\\\n"} 4 1700000000000', {"a": "}{ m 9", "b": 'q"\\\n'}, 4.0),
        (b"m{} 1e3", {}, 1000.0),
    ],
)
def test_lines(line: bytes, labels: dict[str, str], value: float) -> None:
    for text in (line, line + b"\n", b"# comment\n" + line, b"other 1\n" + line + b"\nm2 1\n"):
        (series,) = read_series(text, "m")
        assert (dict(series.labels), series.value) == (labels, value)


@pytest.mark.parametrize("line", [b"m", b"m ", b"m x", b"m NaN", b"m +Inf", b'm{a="b"}', b"m{", b'm{a="b} 4x'])
def test_broken_lines_are_left_out(line: bytes) -> None:
    assert read_series(line + b"\nm 5\n", "m")[-1].value == 5
    assert len(read_series(line + b"\nm 5\n", "m")) == 1


def test_underscores_for_colons() -> None:
    text = b"vllm_num_requests_running 2\nvllm_num_requests_waiting 1\n"
    assert parse_metrics(text, EngineKind.VLLM).running == 2


def test_old_vllm_names() -> None:
    text = (
        b'vllm:num_requests_running{model_name="m"} 2\nvllm:num_requests_waiting{model_name="m"} 1\n'
        b'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        b'vllm:gpu_prefix_cache_queries_total{model_name="m"} 100\n'
        b'vllm:gpu_prefix_cache_hits_total{model_name="m"} 40\n'
    )
    sample = parse_metrics(text, EngineKind.VLLM)
    assert (sample.kv_usage, sample.prefix_queries, sample.prefix_hits, sample.kv_blocks) == (0.5, 100, 40, None)


def test_ranks_of_one_vllm_worker_add_up_and_the_fullest_counts() -> None:
    lines = []
    for engine, running, usage in ((0, 3, 0.2), (1, 5, 0.9)):
        labels = f'{{engine="{engine}",model_name="m"}}'
        lines += [
            f"vllm:num_requests_running{labels} {running}",
            f"vllm:num_requests_waiting{labels} 1",
            f"vllm:kv_cache_usage_perc{labels} {usage}",
            f"vllm:prefix_cache_queries_total{labels} 10",
            f"vllm:prefix_cache_hits_total{labels} 4",
            f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="200"}} 1',
        ]
    sample = parse_metrics("\n".join(lines).encode(), EngineKind.VLLM)
    assert (sample.running, sample.waiting, sample.kv_usage) == (8, 2, 0.9)
    assert (sample.prefix_queries, sample.prefix_hits, sample.kv_blocks) == (20, 8, 200)


@pytest.mark.parametrize("engine", ["vllm-0.32.0", "vllm-0.16.0"])
def test_each_rank_of_vllm_has_its_own_load(engine: str) -> None:
    """A recorded exposition with a second rank: every series again, as the engine writes it."""
    text = text_of(engine).decode()
    second = [line for line in text.splitlines() if 'engine="0"' in line]
    second = [line.replace('engine="0"', 'engine="1"').replace("} 16.0", "} 5.0") for line in second]
    samples = parse_ranks("\n".join((text, *second, "")).encode(), EngineKind.VLLM, (0, 1))
    whole = parse_metrics(text.encode(), EngineKind.VLLM)
    assert set(samples) == {0, 1}
    assert (samples[0].running, samples[1].running) == (16, 5)
    for sample in samples.values():
        assert (sample.waiting, sample.kv_usage, sample.prefix_hits) == (
            whole.waiting,
            whole.kv_usage,
            whole.prefix_hits,
        )
        assert sample.start_time_unix == whole.start_time_unix
    # 0.32.0 says tokens of one rank, 0.16.0 blocks of both.
    assert samples[0].kv_blocks == (128 if engine == "vllm-0.32.0" else 64)


def test_a_rank_that_is_not_in_the_text_is_left_out() -> None:
    assert set(parse_ranks(text_of("vllm-0.32.0"), EngineKind.VLLM, (0, 1))) == {0}
    with pytest.raises(ValueError, match="engine"):
        parse_ranks(text_of("vllm-0.32.0"), EngineKind.VLLM, (1,))
    with pytest.raises(ValueError, match="dp_rank"):
        parse_ranks(text_of("sglang-0.5.23"), EngineKind.SGLANG, (0, 1))


def test_each_rank_of_sglang_has_its_own_load() -> None:
    text = sglang_text(
        'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3',
        'sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 3',
        'sglang:num_running_reqs{dp_rank="1",tp_rank="2"} 4',
        'sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 1',
        'sglang:num_queue_reqs{dp_rank="1",tp_rank="2"} 0',
        'sglang:max_total_num_tokens{dp_rank="0"} 160',
        'sglang:max_total_num_tokens{dp_rank="1"} 320',
        'sglang:page_size{dp_rank="0"} 16',
        'sglang:prompt_tokens_total{model_name="m"} 100',
    )
    samples = parse_ranks(text, EngineKind.SGLANG, (0, 1))
    assert [(samples[n].running, samples[n].waiting, samples[n].kv_blocks) for n in (0, 1)] == [(3, 1, 10), (4, 0, 20)]
    assert samples[0].prefix_queries is None  # counted for all ranks together


def test_hybrid_vllm_counts_its_cache_in_tokens() -> None:
    text = (
        b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        b'vllm:cache_config_info{block_size="16",effective_attention_block_size="32",kv_cache_size_tokens="6400",'
        b'num_gpu_blocks="1000"} 1\n'
    )
    assert parse_metrics(text, EngineKind.VLLM).kv_blocks == 200


def sglang_text(*lines: str) -> bytes:
    return "\n".join((*lines, "sglang:token_usage 0.1", "")).encode()


def test_sglang_counts_tensor_ranks_once_and_data_parallel_ranks_each() -> None:
    text = sglang_text(
        'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3',
        'sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 3',
        'sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 4',
        'sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 1',
        'sglang:num_queue_reqs{dp_rank="1",tp_rank="0"} 0',
    )
    sample = parse_metrics(text, EngineKind.SGLANG)
    assert (sample.running, sample.waiting) == (7, 1)


def test_sglang_priorities_add_up_unless_the_total_is_there() -> None:
    parts = ('sglang:num_running_reqs{priority="0"} 3', 'sglang:num_running_reqs{priority="5"} 4')
    total = 'sglang:num_running_reqs{priority=""} 7'
    for lines in (parts, (*parts, total)):
        assert parse_metrics(sglang_text(*lines, "sglang:num_queue_reqs 0"), EngineKind.SGLANG).running == 7


def test_sglang_total_of_cached_tokens_is_not_counted_twice() -> None:
    text = sglang_text(
        "sglang:num_running_reqs 0",
        "sglang:num_queue_reqs 0",
        "sglang:prompt_tokens_total 100",
        'sglang:cached_tokens_total{cache_source="device"} 30',
        'sglang:cached_tokens_total{cache_source="host"} 10',
        'sglang:cached_tokens_total{cache_source="total"} 40',
    )
    assert parse_metrics(text, EngineKind.SGLANG).prefix_hits == 40


@pytest.mark.parametrize("engine", list(EngineKind))
def test_text_without_load_is_an_error_that_says_so(engine: EngineKind) -> None:
    with pytest.raises(ValueError, match="num_r"):
        parse_metrics(b"process_start_time_seconds 5\n", engine)


def test_loads_of_sglang() -> None:
    body = (
        b'{"timestamp": "x", "loads": ['
        b'{"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.2},'
        b'{"dp_rank": 1, "num_running_reqs": 4, "num_waiting_reqs": 2, "token_usage": 0.7}]}'
    )
    assert parse_loads(body, ()) == {None: LoadSample(7, 3, 0.7)}
    assert parse_loads(body, (1, 0)) == {0: LoadSample(3, 1, 0.2), 1: LoadSample(4, 2, 0.7)}
    assert set(parse_loads(body, (1, 2))) == {1}
    with pytest.raises(ValueError, match="none of the data-parallel ranks"):
        parse_loads(body, (2,))


def test_old_loads_of_sglang_count_waiting_requests_and_their_tokens_too() -> None:
    body = (
        b'[{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 900, "ts_tic": 1.5},'
        b'{"dp_rank": 1, "num_reqs": 1, "num_waiting_reqs": 1, "num_tokens": 100}]'
    )
    assert parse_old_loads(body, ()) == {None: LoadSample(3, 3, None, kv_tokens=1000)}
    assert parse_old_loads(body, (1,)) == {1: LoadSample(0, 1, None, kv_tokens=100)}
    with pytest.raises(ValueError, match="/get_load names no"):
        parse_old_loads(b"[]", ())
    with pytest.raises(ValueError, match="num_reqs"):
        parse_old_loads(b"[{}]", ())


def test_a_share_that_is_not_told_is_unknown() -> None:
    assert parse_loads(b'{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0}]}', ())[None].kv_usage is None
    assert parse_metrics(VLLM_LOAD.encode(), EngineKind.VLLM).kv_usage is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"loads": []}', b'{"loads": [{"num_running_reqs": "x"}]}', b"\xff"])
def test_loads_of_another_shape(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the reasons differ, that it is one counts
        parse_loads(body, ())


# --------------------------------------------------------------------------- adapters

VLLM_LOAD = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"


def info(value: float, *, running: str = "", waiting: str = "", slots: str = "2", engine: str | None = None) -> str:
    rank = "" if engine is None else f'engine="{engine}",'
    labels = f'{rank}max_lora="{slots}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {value}\n"


def test_the_newest_series_names_the_adapters_in_use() -> None:
    text = info(1.7e9, running="old") + info(1.7e9 + 2, running="a,b", waiting="c, a") + info(1.7e9 + 1)
    sample = parse_metrics((VLLM_LOAD + text).encode(), EngineKind.VLLM)
    assert (set(sample.adapters), sample.adapter_slots) == ({"a", "b", "c"}, 2)
    quiet = parse_metrics((VLLM_LOAD + info(1.7e9)).encode(), EngineKind.VLLM)
    assert (quiet.adapters, quiet.adapter_slots) == ((), 2)
    none = parse_metrics(VLLM_LOAD.encode(), EngineKind.VLLM)
    assert (none.adapters, none.adapter_slots) == ((), None)


@pytest.mark.parametrize("labelled", [True, False])
def test_adapters_of_ranks_are_their_own_where_the_series_say_whose(labelled: bool) -> None:
    lines = [f'vllm:num_requests_{what}{{engine="{rank}"}} 1\n' for rank in (0, 1) for what in ("running", "waiting")]
    lines += [info(2.0 + rank, running=f"a{rank}", engine=str(rank) if labelled else None) for rank in (0, 1)]
    samples = parse_ranks("".join(lines).encode(), EngineKind.VLLM, (0, 1))
    assert [samples[rank].adapters for rank in (0, 1)] == [("a0",) if labelled else ("a1",), ("a1",)]


def test_sglang_says_how_many_adapters_fit_and_not_which() -> None:
    text = sglang_text(
        "sglang:num_running_reqs{} 1", "sglang:num_queue_reqs{} 0", 'sglang:lora_pool_slots_total{tp_rank="0"} 4'
    )
    sample = parse_metrics(text, EngineKind.SGLANG)
    assert (sample.adapters, sample.adapter_slots) == ((), 4)


@pytest.mark.parametrize("parse", [parse_loads, parse_old_loads])
def test_loads_that_are_nested_without_end_are_none(parse: Callable[[bytes, list[int]], object]) -> None:
    deep = b"[" * 3000 + b"]" * 3000
    for body in (deep, b'{"loads":[],"zz":%b}' % deep, b'[{"num_reqs":1,"num_waiting_reqs":0,"zz":%b}]' % deep):
        with pytest.raises(ValueError, match=r"."):
            parse(body, [])


@pytest.mark.parametrize("number", ["-1", "1e300", "2e12"])
def test_numbers_of_requests_that_cannot_be_are_no_load(number: str) -> None:
    for running, waiting in ((number, "0"), ("0", number)):
        vllm = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n".encode()
        with pytest.raises(ValueError, match="is no load"):
            parse_metrics(vllm, EngineKind.VLLM)
        sglang = f"sglang:num_running_reqs {running}\nsglang:num_queue_reqs {waiting}\n".encode()
        if number != "-1":  # of one rank's repeated numbers the largest counts, from 0 on
            with pytest.raises(ValueError, match="is no load"):
                parse_metrics(sglang, EngineKind.SGLANG)
        one = b'{"num_running_reqs":%b,"num_waiting_reqs":%b}' % (running.encode(), waiting.encode())
        with pytest.raises(ValueError, match="is no load"):
            parse_loads(b'{"loads":[%b]}' % one, [])
    with pytest.raises(ValueError, match="is no load"):
        parse_old_loads(b'[{"num_reqs":1,"num_waiting_reqs":%b}]' % number.encode(), [])


@pytest.mark.parametrize("size", ["9" * 5000, "9" * 20, "-3", "0", "1e9"])
def test_sizes_that_can_be_none_are_not_known(size: str) -> None:
    told = f'block_size="{size}",num_gpu_blocks="{size}",kv_cache_size_tokens="{size}"'
    text = f"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:cache_config_info{{{told}}} 1\n"
    assert parse_metrics(text.encode(), EngineKind.VLLM).kv_blocks is None
    much = "sglang:num_running_reqs 1\nsglang:num_queue_reqs 0\nsglang:page_size 1\nsglang:max_total_num_tokens 1e308\n"
    assert parse_metrics(much.encode(), EngineKind.SGLANG).kv_blocks is None
