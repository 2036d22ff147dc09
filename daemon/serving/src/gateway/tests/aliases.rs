//! Requests that name an alias, whose models cannot all answer.

use ::engines::{
    health::Fault,
    places::{Claim, Turn},
};
use tokio::{task::yield_now, time::timeout};

use super::*;

const ALIAS: &str = r#"{"model":"auto"}"#;

/// A client of a gateway with an alias for a large and a small model with this engine, which work on one request each. For the large
/// model no request may wait, for the small one two may.
async fn client(engine: &str) -> Client {
    let names = ["large", "small"].map(str::to_owned).to_vec();
    let models = [("large", 0), ("small", 2)].map(|(name, max_waiting)| {
        let engines = vec![engine.parse().unwrap()];
        ModelSettings { engines, affinity: false, max_waiting, ..model(name) }
    });
    let alias = Alias { name: "auto".into(), models: names, policy: Routing::Rule, shadow: None };
    let (models, aliases) = (models.to_vec(), vec![alias]);
    Client::with(GatewaySettings { models, aliases, ..GatewaySettings::default() }).await
}

/// Takes a place at the engine of a model, or among its waiting requests.
fn take(client: &Client, model: usize) -> Turn {
    client.gateway.models[model].engines.take(Claim::default(), &[]).unwrap()
}

#[tokio::test]
async fn a_model_with_too_many_waiting_requests_leaves_a_request_to_the_aliass_other_models() {
    let mut client = client(&engine("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await).await;
    // No request waits for the large model, so that it is chosen first.
    let (_large, small) = (take(&client, 0), [take(&client, 1), take(&client, 1)]);
    let waits_for = client.gateway.models[1].engines.clone();
    let answer = tokio::spawn(client.requests.send_request(chat(whole(ALIAS.into()))));
    let is_waiting = async {
        while waits_for.waiting() < 2 {
            yield_now().await;
        }
    };
    timeout(Duration::from_secs(30), is_waiting).await.unwrap();
    drop(small);
    let answer = answer.await.unwrap().unwrap();
    assert_eq!((answer.status().as_u16(), answer.headers()["x-paced-model"].as_bytes()), (200, &b"small"[..]));
}

#[tokio::test]
async fn a_request_that_a_model_has_no_room_for_is_one_too_many_even_if_the_aliass_other_models_have_failed() {
    for is_known in [true, false] {
        let mut client = client("http://127.0.0.1:1/v1").await;
        let _large = take(&client, 0);
        let small = &client.gateway.models[1].engines;
        let busy = if is_known {
            // With checks, and none runs here: it does not come back by itself.
            small.expect(true, u64::MAX);
            small.failed(0, Fault::OutOfReach, "");
            None
        } else {
            // So that the large model is chosen first.
            Some([take(&client, 1), take(&client, 1)])
        };
        let answer = tokio::spawn(client.requests.send_request(chat(whole(ALIAS.into()))));
        if let Some(busy) = busy {
            let is_waiting = async {
                while small.waiting() < 2 {
                    yield_now().await;
                }
            };
            timeout(Duration::from_secs(30), is_waiting).await.unwrap();
            drop(busy);
        }
        let answer = answer.await.unwrap().unwrap();
        assert_eq!((answer.status().as_u16(), answer.headers()["retry-after"].as_bytes()), (429, &b"1"[..]));
        assert_eq!(client.served.recv().await.unwrap().reason, "overloaded", "{is_known}");
    }
}
