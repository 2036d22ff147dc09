//! What the heads of requests may take.

use super::*;

#[tokio::test]
async fn the_heads_of_requests_whose_bodies_do_not_come_count_as_much_as_bodies() {
    let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
    let limits = ClientLimits { bodies_bytes: 20 << 10, ..limits(4, Arc::default()) };
    let entrance = ModelEntrance::new(Nowhere::Refused, classes, limits, Arc::default());
    let with_head =
        |bytes| REQUEST.replace("host", &format!("connection: close\r\nx-a: {}\r\nhost", "x".repeat(bytes)));
    let (_first, task) = begin(&entrance, &with_head(12 << 10)).await;
    let refused = async |bytes| {
        let (mut client, _) = begin(&entrance, &format!("{}{{}}", with_head(bytes))).await;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        answer.starts_with("HTTP/1.1 429 ")
    };
    assert!(!refused(1 << 10).await, "it is no larger than usual");
    assert!(refused(12 << 10).await, "the first one waits for its body");
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert!(!refused(12 << 10).await);
}
