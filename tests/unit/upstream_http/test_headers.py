"""Header hygiene."""

from __future__ import annotations

from gateway.upstream.headers import STATUS_LINES, AnswerHead, answer_fields, ends_with_connection, request_head


def test_request_headers() -> None:
    head = request_head(
        b"/v1/score?x=1",
        [
            (b"host", b"public"),
            (b"connection", b"close, X-Hop"),
            (b"connection", b"authorization"),
            (b"x-hop", b"1"),
            (b"authorization", b"Bearer c"),
            (b"accept-encoding", b"gzip"),
            (b"x-kvgate-retries", b"9"),
            (b"x-data-parallel-rank", b"1"),
            (b"x-override-routed-dp-rank", b"1"),
            (b"x-request-id", b"theirs"),
            (b"accept", b"*/*"),
            (b"accept", b"text/plain"),
        ],
        request_id=b"r1",
    )
    assert head.to_worker(b"w:1", b"", 3) == (
        b"POST /v1/score?x=1 HTTP/1.1\r\nhost: w:1\r\nx-request-id: r1\r\naccept: */*\r\naccept: text/plain\r\n"
        b"content-length: 3\r\n\r\n"
    )


def test_a_workers_key_replaces_the_clients() -> None:
    head = request_head(b"/", [(b"authorization", b"Bearer client")], request_id=b"r")
    assert b"Bearer client" in head.to_worker(b"w", b"", 0)
    keyed = head.to_worker(b"w", b"authorization: Bearer worker\r\n", 0)
    assert b"Bearer worker" in keyed
    assert b"Bearer client" not in keyed


def test_credentials_meant_for_the_gateway_go_no_further() -> None:
    names = (b"authorization", b"x-api-key", b"api-key")
    headers = [(name, b"client-secret") for name in names]
    through = request_head(b"/", headers, request_id=b"r").to_worker(b"w", b"", 0)
    assert [through.count(b"\r\n%b: client-secret\r\n" % name) for name in names] == [1, 1, 1]
    own = request_head(b"/", headers, request_id=b"r", credentials_end_here=True)
    for key in (b"", b"authorization: Bearer worker\r\n"):
        assert b"client-secret" not in own.to_worker(b"w", key, 0)


def test_the_rank_is_the_gateways_choice() -> None:
    head = request_head(b"/", [(b"x-data-parallel-rank", b"7")], request_id=b"r")
    assert b"parallel" not in head.to_worker(b"w", b"", 0)
    placed = head.to_worker(b"w", b"", 0, rank=b"x-data-parallel-rank: 1\r\n")
    assert placed.count(b"parallel") == 1
    assert b"\r\nx-data-parallel-rank: 1\r\ncontent-length: 0\r\n\r\n" in placed


def test_answer_headers() -> None:
    fields = answer_fields(
        [
            (b"Date", b"now"),
            (b"Content-Type", b"text/event-stream"),
            (b"Transfer-Encoding", b"Chunked"),
            (b"Connection", b"keep-alive, X-Hop"),
            (b"X-Hop", b"1"),
            (b"X-Kvgate-Worker", b"forged"),
            (b"Access-Control-Allow-Origin", b"*"),
            (b"X-Request-Id", b"theirs"),
            (b"Retry-After", b"3"),
        ],
        without_request_id=True,
    )
    assert fields.lines == b"Date: now\r\nContent-Type: text/event-stream\r\nRetry-After: 3\r\n"
    assert (fields.content_type, fields.content_length, fields.transfer_coding) == (
        b"text/event-stream",
        None,
        b"chunked",
    )
    assert fields.has_retry_after
    kept = answer_fields([(b"X-Request-Id", b"theirs"), (b"Content-Length", b"7")], without_request_id=False)
    assert (kept.lines, kept.content_length) == (b"X-Request-Id: theirs\r\n", b"7")


def test_which_answers_end_with_their_connection() -> None:
    assert ends_with_connection(AnswerHead(200, [(b"date", b"x")]))
    assert not ends_with_connection(AnswerHead(204, []))
    assert not ends_with_connection(AnswerHead(200, [(b"Content-Length", b"0")]))
    assert not ends_with_connection(AnswerHead(200, [(b"Transfer-Encoding", b"chunked")]))


def test_status_lines() -> None:
    assert STATUS_LINES[200] == b"HTTP/1.1 200 OK\r\n"
    assert STATUS_LINES[799] == b"HTTP/1.1 799 \r\n"
