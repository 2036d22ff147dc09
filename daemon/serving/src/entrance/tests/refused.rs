//! Requests that an edge refuses before it asks a gateway.

use super::*;

#[tokio::test]
async fn a_client_whose_body_is_too_large_reads_the_reason_even_if_it_sends_on() {
    let fits = send("content-length: 1000", 1_000).await.unwrap();
    assert!(fits.starts_with("HTTP/1.1 503 ") && fits.contains("for 1000 bytes"), "{fits}");
    let size = 8 << 20;
    // The line end after the fields belongs to the chunk, which never ends.
    let chunk = format!("transfer-encoding: chunked\r\n\r\n{:x}", size + 3);
    for fields in [&format!("content-length: {size}"), &chunk] {
        let refused = send(fields, size).await.unwrap();
        assert!(refused.starts_with("HTTP/1.1 413 ") && refused.contains("1000 bytes"), "{refused}");
    }
    let early = send("content-length: 1001\r\nexpect: 100-continue", 0).await.unwrap();
    assert!(early.starts_with("HTTP/1.1 413 "), "the client need not send its body: {early}");
    for _ in 0..4 {
        let unasked = send(&format!("content-length: {size}\r\nexpect: 100-continue"), size).await.unwrap();
        assert!(unasked.starts_with("HTTP/1.1 413 ") && unasked.contains("1000 bytes"), "{unasked}");
    }
    let waited = send("content-length: 2\r\nexpect: 100-continue", 2).await.unwrap();
    assert!(waited.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 "), "{waited}");
}

#[tokio::test]
async fn a_time_limit_that_is_no_number_is_refused_by_name_before_a_gateway_is_asked() {
    for (value, status) in [("soon", 400), ("-5", 400), ("99999999999999999999", 503)] {
        let answer = send(&format!("content-length: 2\r\nx-slo-tpot-ms: {value}"), 2).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{value}: {answer}");
        assert_eq!(answer.contains("x-slo-tpot-ms"), status == 400, "{answer}");
    }
}
