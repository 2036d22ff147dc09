use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use api::v1::{self, control_service_server::ControlService as _};
use config::policy::Policy;
use futures::{FutureExt as _, StreamExt as _};
use quic::class::{ClassMetrics, PolicyRole};
use role::{
    access::record::{RecordedRequest, RefusedRequest},
    classes::Classes,
};
use state::StateFolder;
use tokio::time::timeout_at;
use uplink::Destination;

use super::{grpc::ControlService, *};
use crate::policy::{Enforce, Origin, Suspended};

const ONE: &str = "[class.one]\n";
const ROOT: fn() -> Caller = || Caller { name: "root".into(), may_write: true };

/// Returns a control plane without roles for a configuration, and the requests to reload that it makes.
pub(super) fn control(text: &str) -> (Arc<Control>, mpsc::Receiver<Reload>) {
    suspended_control(text, Box::new(|| Duration::ZERO))
}

/// The same on a machine that is `suspended` at times.
fn suspended_control(text: &str, suspended: Suspended) -> (Arc<Control>, mpsc::Receiver<Reload>) {
    let config = Config::from_toml(&format!("state_dir = \"/dev/null/state\"\n{text}")).unwrap();
    let enforce = Enforce { kernel: Box::new(|_| Ok(())), roles: Box::new(|_| ()) };
    let policies = Policies::on(suspended, &config, StateFolder::unclaimed(&config.state_dir), None, enforce);
    let classes = Classes::new(Policy::default(), PolicyRole::Relay, &ClassMetrics::default(), |_| Default::default());
    let answering = (None, GatewayInForce::new(Arc::new(classes)));
    let (reloads, wishes) = mpsc::channel(1);
    (Control::new(policies, answering, Arc::default(), Facts::new(&config, 1, &[]), reloads), wishes)
}

#[tokio::test]
async fn a_trial_ends_although_its_caller_left_before_the_answer() {
    let (control, _wishes) = control("");
    let (keeper, mut in_force) = (control.clone(), control.policies.watch());
    let keeper = tokio::spawn(async move { keeper.expire_trials().await });
    let caller = ROOT();
    let trial = Submission { text: ONE.into(), confirm_within: Some(Duration::from_nanos(1)), ..Submission::default() };
    // The policy is put in force on another thread, which the end of the call does not stop.
    _ = control.set_policy(&caller, trial).now_or_never();
    in_force.wait_for(|in_force| in_force.revision.origin == Origin::Unconfirmed { number: 2 }).await.unwrap();
    assert_eq!((control.in_force().revision.number, control.in_force().trial), (3, None));
    keeper.abort();
}

#[tokio::test(start_paused = true)]
async fn a_trial_ends_in_time_although_the_clock_of_the_machine_was_set_back() {
    let (control, _wishes) = control("");
    let (keeper, mut in_force) = (control.clone(), control.policies.watch());
    let keeper = tokio::spawn(async move { keeper.expire_trials().await });
    let hour = Duration::from_secs(3_600);
    let trial = Submission { text: ONE.into(), confirm_within: Some(hour), ..Submission::default() };
    let begin = tokio::time::Instant::now();
    control.set_policy(&ROOT(), trial).await.unwrap();
    // The machine's clock shows hardly any later time, because only the time of this test passes.
    let is_back = |in_force: &InForce| in_force.revision.origin == Origin::Unconfirmed { number: 2 };
    timeout_at(begin + 2 * hour, in_force.wait_for(is_back)).await.expect("the trial ends").unwrap();
    assert_eq!(begin.elapsed().as_secs(), hour.as_secs());
    keeper.abort();
}

#[tokio::test(start_paused = true)]
async fn a_trial_ends_soon_after_a_machine_wakes_that_was_suspended_at_its_end() {
    let hour = Duration::from_secs(3_600);
    let slept = Arc::new(AtomicU64::new(7));
    let so_far = slept.clone();
    let (control, _wishes) = suspended_control("", Box::new(move || Duration::from_secs(so_far.load(Relaxed))));
    let (keeper, mut in_force) = (control.clone(), control.policies.watch());
    let keeper = tokio::spawn(async move { keeper.expire_trials().await });
    let trial = Submission { text: ONE.into(), confirm_within: Some(hour), ..Submission::default() };
    control.set_policy(&ROOT(), trial).await.unwrap();
    let begin = tokio::time::Instant::now();
    sleep(hour / 2).await;
    assert!(control.in_force().trial.is_some());
    slept.fetch_add(hour.as_secs(), Relaxed);
    let is_back = |in_force: &InForce| in_force.revision.origin == Origin::Unconfirmed { number: 2 };
    timeout_at(begin + 2 * hour, in_force.wait_for(is_back)).await.expect("the trial ends").unwrap();
    assert!(begin.elapsed() - hour / 2 <= STEP, "{:?}", begin.elapsed());
    keeper.abort();
}

#[tokio::test]
async fn of_listed_revisions_the_one_in_force_has_the_end_of_its_trial() {
    let (control, _wishes) = control("");
    let trial = Submission { text: ONE.into(), confirm_within: Some(STEP), ..Submission::default() };
    control.set_policy(&ROOT(), trial).await.unwrap();
    let in_force = control.in_force();
    let service = ControlService::new(Arc::new(control));
    let request = tonic::Request::new(v1::ListRevisionsRequest {});
    let v1::ListRevisionsResponse { revisions, revision } = service.list_revisions(request).await.unwrap().into_inner();
    let listed: Vec<_> = revisions.into_iter().map(|found| (found.number, found.confirm_by)).collect();
    assert_eq!((listed, revision), (vec![(1, None), (2, in_force.confirm_by().map(Into::into))], 2));
    assert!(in_force.confirm_by().is_some());
}

#[test]
fn a_reload_keeps_the_number_of_workers_that_the_start_found() {
    let relay = "[relay]\nlisten = [\"127.0.0.1:1\"]\nworkers = 4\ncertificate = \"/c\"\nprivate_key = \"/k\"\nauth = \"none\"\n\
                 templates = [\"https://relay.example/{target_host}/{target_port}/\"]\n";
    let config = Config::from_toml(relay).unwrap();
    let facts = Facts::new(&config, 1, &[]);
    assert_eq!((facts.workers, facts.after(&config).workers), (1, 1), "packets cannot be steered there");
}

#[tokio::test]
async fn an_expected_revision_of_zero_stands_for_any() {
    let (control, _wishes) = control("");
    let number = async |expected| {
        let submission = Submission { text: ONE.into(), expected: Some(expected), ..Submission::default() };
        control.set_policy(&ROOT(), submission).await.map(|accepted| accepted.revision.number)
    };
    assert!(number(7).await.is_err());
    assert_eq!(number(0).await.unwrap(), 2);
}

#[test]
fn a_gateway_without_a_relay_has_listeners_and_classes() {
    let gateway = "[[gateway.listener]]\naddress = \"127.0.0.1:8100\"\ntls = false\n\
                   [[gateway.model]]\nname = \"large\"\nengines = [\"http://127.0.0.1:8001\"]\n";
    let found = |text: &str| {
        let (control, _wishes) = control(text);
        let roles: Vec<_> = control.classes().into_iter().map(|stats| (stats.class, stats.role)).collect();
        (control.facts().has_listeners(), roles)
    };
    let (has_listeners, classes) = found(&format!("{gateway}{ONE}"));
    assert!(has_listeners && classes.contains(&("one".to_owned(), PolicyRole::Relay)), "{classes:?}");
    assert_eq!(found(ONE), (false, Vec::new()));
}

#[tokio::test]
async fn readers_of_the_status_do_not_see_the_targets_of_forwards() {
    let relay = "https://relay.example/{target_host}/{target_port}/";
    let text = format!("[[forward]]\nlisten = \"127.0.0.1:53\"\nrelay = \"{relay}\"\ntarget = \"a.example:53\"\n");
    let (control, _wishes) = control(&text);
    let bearers = Bearers::new(&["ops.example.org".into()]);
    let service = ControlService::new(Arc::new(control));
    let forwards = async |name: &str| {
        let mut request = tonic::Request::new(v1::GetStatusRequest::default());
        request.extensions_mut().insert(Peer::Bearer { names: vec![name.into()], bearers: bearers.clone() });
        service.get_status(request).await.unwrap().into_inner().forwards
    };
    let seen = forwards("ops.example.org").await;
    assert!(seen[0].starts_with("127.0.0.1:53 (UDP) to a.example:53 through "), "{seen:?}");
    let seen = forwards("reader.example.org").await;
    assert!(seen[0].starts_with("127.0.0.1:53 (UDP) through "), "{seen:?}");
}

#[tokio::test]
async fn a_user_that_is_no_longer_a_writer_receives_no_more_addresses() {
    let (control, _wishes) = control("");
    let bearers = Bearers::new(&["ops.example.org".into()]);
    let peer = Peer::Bearer { names: vec!["ops.example.org".into()], bearers: bearers.clone() };
    let mut request = tonic::Request::new(v1::WatchEventsRequest::default());
    request.extensions_mut().insert(peer);
    let mut events = ControlService::new(Arc::new(control.clone())).watch_events(request).await.unwrap().into_inner();
    let mut signals = control.events(&[], None);
    for expected in ["192.0.2.1:5", ""] {
        let refused = RefusedRequest { status: Some(403), error: None, reason: "target" };
        let request = RecordedRequest {
            connection: None,
            listener: "192.0.2.9:443".parse().unwrap(),
            client: Some("192.0.2.1:5".parse().unwrap()),
            user: None,
            protocol: None,
            target: None,
            way: None,
        };
        control.parts.access.refused(request, refused);
        assert_eq!(events.next().await.unwrap().unwrap().access.unwrap().client, expected);
        bearers.replace(&[]);
        let Some(Happening::Access(record)) = signals.next().await else { panic!("a record is signalled") };
        assert!(!record.text().contains("192.0.2.1"), "signals go to everyone: {}", record.text());
    }
}

#[tokio::test]
async fn tunnels_of_an_edge_that_does_not_exist_are_not_said_to_lack_a_relay() {
    let (control, _wishes) = control("");
    for to in [None, Some(Destination::Relay("relay.example:443".to_owned()))] {
        let refusal = control.move_edge(&ROOT(), to.as_ref()).await.unwrap_err().to_string();
        assert!(refusal.starts_with("this paced has no edge"), "{refusal}");
    }
}

#[tokio::test(start_paused = true)]
async fn callers_that_watch_share_statistics_for_a_while() {
    let (control, _wishes) = control("");
    let first = control.statistics();
    assert!(Arc::ptr_eq(&first, &control.statistics()));
    tokio::time::advance(Duration::from_millis(100)).await;
    assert!(!Arc::ptr_eq(&first, &control.statistics()), "the shortest interval is over");
}

#[tokio::test]
async fn a_caller_that_watches_too_much_is_refused_and_others_are_not() {
    let (control, _wishes) = control("");
    let service = ControlService::new(Arc::new(control));
    let watch = async |name: &str| {
        let mut request = tonic::Request::new(v1::WatchStatsRequest::default());
        request.extensions_mut().insert(Peer::Bearer { names: vec![name.into()], bearers: Bearers::new(&[]) });
        service.watch_stats(request).await
    };
    let mut held = Vec::new();
    for _ in 0..16 {
        held.push(watch("a.example.org").await.unwrap());
    }
    let refused = watch("a.example.org").await.err().unwrap();
    assert!(
        refused.code() == tonic::Code::ResourceExhausted && refused.message().contains("a.example.org"),
        "{refused}"
    );
    watch("b.example.org").await.unwrap();
    held.pop();
    watch("a.example.org").await.unwrap();
}

#[tokio::test]
async fn so_many_calls_work_with_policies_at_once_and_more_are_refused_also_if_their_callers_left() {
    let (control, _wishes) = control("");
    // If an assertion fails, this sender is dropped, and the work ends.
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let gate = Arc::new(parking_lot::Mutex::new(gate));
    for _ in 0..POLICY_CALLS {
        let gate = gate.clone();
        let work = control.work(move |_| {
            _ = gate.lock().recv();
            Ok(())
        });
        assert!(work.now_or_never().is_none());
    }
    let root = ROOT();
    let submit = || control.set_policy(&root, Submission { text: ONE.into(), ..Submission::default() });
    assert!(matches!(submit().await, Err(Error::Busy)));
    drop(open);
    drop(control.policy_calls.acquire_many(POLICY_CALLS as u32).await.unwrap());
    assert_eq!(submit().await.unwrap().revision.number, 2);
}

#[tokio::test]
async fn a_slow_subscriber_loses_the_oldest_events_and_learns_how_many() {
    let (control, _wishes) = control("");
    let mut events = control.events(&[], None);
    for number in 0..events::QUEUE + 3 {
        control.tell("policy", number.to_string());
    }
    assert!(matches!(events.next().await, Some(Happening::Lost(3))));
    for number in 3..events::QUEUE + 3 {
        let found = events.next().await;
        assert!(matches!(&found, Some(Happening::Event(event)) if event.message == number.to_string()), "{found:?}");
    }
    assert!(events.next().now_or_never().is_none());
}
