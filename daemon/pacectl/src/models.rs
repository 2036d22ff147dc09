//! `pacectl requests` and `engines`: the gateway's requests, engines and aliases.

use std::time::Duration;

use anyhow::Result;
use api::{ControlClient, say, v1};

use super::{
    door::pages,
    table::{age, or_dash, show, table},
};

pub(crate) async fn requests(client: &mut ControlClient, as_json: bool) -> Result<()> {
    let requests = pages(async |page_token| {
        let asked = v1::ListRequestsRequest { page_token, ..v1::ListRequestsRequest::default() };
        let page = client.list_requests(asked).await?.into_inner();
        Ok((page.requests, page.next_page_token))
    });
    let heads = ["id", "user", "class", "model", "state", "for", "budget", "tokens", "tokens/s"];
    let requests = requests.await?;
    if !as_json && requests.is_empty() && !has_gateway(client).await? {
        say!("{NO_GATEWAY}");
        return Ok(());
    }
    show(as_json, requests, |requests| table(heads, requests.iter().map(request)))
}

/// Returns the cells of a request.
pub(crate) fn request(of: &v1::ModelRequest) -> [String; 9] {
    let budget = of.budget.and_then(|budget| Duration::try_from(budget).ok());
    [
        of.id.to_string(),
        or_dash(&of.user),
        or_dash(&of.class),
        or_dash(&of.model),
        of.stage.clone(),
        age(of.since.as_ref()),
        budget.map_or_else(|| "-".into(), |budget| format!("{:.1} s", budget.as_secs_f64())),
        of.tokens.to_string(),
        if of.tokens_per_sec > 0.0 { format!("{:.1}", of.tokens_per_sec) } else { "-".into() },
    ]
}

const NO_GATEWAY: &str = "there is no gateway";

/// Returns whether the daemon has a gateway: a gateway has engines.
async fn has_gateway(client: &mut ControlClient) -> Result<bool> {
    Ok(!client.list_engines(v1::ListEnginesRequest {}).await?.into_inner().engines.is_empty())
}

/// Says whether an engine gets requests, and why not.
pub(crate) fn engine_state(of: &v1::Engine) -> String {
    let ejected_for = of.ejected_for.and_then(|time| Duration::try_from(time).ok());
    match ejected_for {
        Some(left) => format!("failed, {:.0} s", left.as_secs_f64().ceil()),
        None if of.in_flight >= of.max_in_flight && of.state != "down" && of.state != "refusing" => "full".into(),
        None => of.state.clone(),
    }
}

pub(crate) async fn engines(client: &mut ControlClient, as_json: bool) -> Result<()> {
    let answer = client.list_engines(v1::ListEnginesRequest {}).await?.into_inner();
    let row = |of: v1::Engine| {
        let state = engine_state(&of);
        let [first_token, step] = of.cost.as_ref().map_or_else(|| ["-".into(), "-".into()], cost);
        [
            of.model,
            or_dash(&of.engine),
            state,
            format!("{} of {}", of.in_flight, of.max_in_flight),
            (of.others_running + of.others_waiting).to_string(),
            of.waiting.to_string(),
            of.answered.to_string(),
            of.failed.to_string(),
            first_token,
            step,
            or_dash(&of.trouble),
        ]
    };
    let heads = [
        "model",
        "engine",
        "state",
        "at work on",
        "of others",
        "waiting",
        "answered",
        "failed",
        "first token, by prompt",
        "step, by requests",
        "last trouble",
    ];
    show(as_json, answer, |answer| {
        if answer.engines.is_empty() {
            say!("{NO_GATEWAY}");
            return;
        }
        table(heads, answer.engines.into_iter().map(row));
        if !answer.aliases.is_empty() {
            say!("");
            let heads = ["alias", "policy", "decided", "guarded", "fell back", "shadow", "agreed"];
            table(heads, answer.aliases.into_iter().map(alias));
        }
    })
}

/// Returns the estimates of an engine: of a first token by the length of the prompt, and of a step by the number of requests.
fn cost(of: &v1::EngineCost) -> [String; 2] {
    let ms = |time: Option<prost_types::Duration>| {
        let time = time.and_then(|time| Duration::try_from(time).ok()).unwrap_or_default();
        format!("{:.1} ms", time.as_secs_f64() * 1e3)
    };
    [
        format!("{} + {} per 1000", ms(of.first_token), ms(of.first_token_per_thousand)),
        format!("{} + {} each{}", ms(of.step), ms(of.step_per_request), beside(of.longer_per_neighbour)),
    ]
}

/// Says by how much a busy engine on the same GPU makes steps longer, if that is at least half a per cent.
fn beside(longer: f64) -> String {
    if longer < 0.005 { String::new() } else { format!(", + {:.0} % by a neighbour", longer * 100.0) }
}

fn alias(of: v1::ModelAlias) -> [String; 7] {
    let is_watched = !of.shadow_kind.is_empty();
    [
        of.alias,
        policy(&of.policy, &of.kind),
        of.decided.to_string(),
        of.guarded.to_string(),
        of.fell_back.to_string(),
        if is_watched { policy(&of.shadow, &of.shadow_kind) } else { "-".into() },
        if is_watched { format!("{} of {}", of.agreed, of.shadowed) } else { "-".into() },
    ]
}

/// Returns the policy of an alias, with its kind if a file defines it.
pub(crate) fn policy(name: &str, kind: &str) -> String {
    match name {
        "" => kind.to_owned(),
        _ if name.starts_with('/') => format!("{kind} ({name})"),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_estimated_time_of_an_engine_has_its_unit() {
        let time = |ms: i32| Some(prost_types::Duration { seconds: 0, nanos: ms * 1_000_000 });
        let of = v1::EngineCost {
            first_token: time(20),
            first_token_per_thousand: time(45),
            step: time(12),
            step_per_request: time(1),
            longer_per_neighbour: 0.1,
            ..v1::EngineCost::default()
        };
        assert_eq!(cost(&of), ["20.0 ms + 45.0 ms per 1000", "12.0 ms + 1.0 ms each, + 10 % by a neighbour"]);
    }
}
