//! The messages that callers of the control plane send, one after another.

use std::sync::{Arc, LazyLock};

use api::v1::{self, control_service_server::ControlService as _};
use config::{Config, policy::Policy};
use futures::{FutureExt as _, Stream, StreamExt as _};
use paced::{
    control::{
        Control, Facts,
        caller::{Bearers, Peer},
        grpc::ControlService,
    },
    parts::Parts,
    policy::{Enforce, Policies, check},
};
use prost::Message;
use quic::class::{ClassMetrics, PolicyRole};
use role::classes::Classes;
use serving::in_force::GatewayInForce;
use state::StateFolder;
use tokio::{
    runtime::{self, Runtime},
    sync::mpsc,
};
use tonic::{Code, Request, Response, Status};

use crate::input::choice;

/// The most calls of one input: each may put a policy in force.
const CALLS: usize = 8;

/// More than the length of the longest error message: 4 KiB, and a line that says that there is more.
const MESSAGE_BYTES: usize = 4096 + 16;

static FACTS: LazyLock<(Config, Facts)> = LazyLock::new(|| {
    // A device is not a folder, so even root cannot save there.
    let config = Config::from_toml("state_dir = \"/dev/null/state\"").unwrap_or_else(|errors| panic!("{errors:?}"));
    let facts = Facts::new(&config, 1, &[]);
    (config, facts)
});

/// One runtime for all inputs, because creating one for each would take most of the time, to start threads for blocking
/// calls.
static RUNTIME: LazyLock<Option<Runtime>> =
    LazyLock::new(|| runtime::Builder::new_current_thread().enable_time().build().ok());

/// Every call is answered, or refused with a message of bounded length. The policy in force is always valid, and a reader
/// cannot change it.
pub fn control_requests(mut input: &[u8]) {
    let may_write = choice(&mut input, 2) == 1;
    let Some(runtime) = &*RUNTIME else { return };
    runtime.block_on(async {
        let (config, facts) = &*FACTS;
        let enforce = Enforce { kernel: Box::new(|_| Ok(())), roles: Box::new(|_| ()) };
        let policies = Policies::new(config, StateFolder::unclaimed(&config.state_dir), None, enforce);
        // Reloads fail, because the receiver is dropped.
        let (reloads, _) = mpsc::channel(1);
        let classes =
            Classes::new(Policy::default(), PolicyRole::Relay, &ClassMetrics::default(), |_| Default::default());
        let answering = (None, GatewayInForce::new(Arc::new(classes)));
        let control = Control::new(policies.clone(), answering, Arc::new(Parts::default()), facts.clone(), reloads);
        let service = ControlService::new(Arc::new(control));
        let names = vec!["caller.example.org".to_owned()];
        let bearers = Bearers::new(if may_write { &names } else { &[] });
        let peer = Peer::Bearer { names, bearers };
        for _ in 0..CALLS {
            if input.is_empty() {
                break;
            }
            let before = policies.current().number;
            let method = choice(&mut input, METHODS);
            let len = usize::from(choice(&mut input, u8::MAX)) << (choice(&mut input, 2) * 4);
            let (message, rest) = input.split_at(len.min(input.len()));
            input = rest;
            let Some(answer) = call(&service, &peer, method, message).await else { continue };
            if let Err(status) = answer {
                assert!(status.message().len() <= MESSAGE_BYTES, "{} bytes of error", status.message().len());
                assert!(![Code::Unknown, Code::Unauthenticated].contains(&status.code()), "{status}");
            }
            let now = policies.current();
            assert!(
                if may_write { now.number >= before } else { now.number == 1 },
                "revision {} is in force",
                now.number
            );
            if now.number != before {
                assert_eq!(
                    check(&now.text, &[]).as_ref(),
                    Ok(&now.policy),
                    "the policy in force does not match its text"
                );
            }
            assert!(!policies.in_force().is_saved, "a policy is saved, which is impossible");
        }
    });
}

/// Defines `call`, which calls a method by its number with the bytes of a message.
macro_rules! methods {
    ($($unary:ident($request:ident))*; $($watch:ident($watched:ident))*) => {
        const METHODS: u8 = [$(stringify!($unary),)* $(stringify!($watch)),*].len() as u8;

        /// Calls a method with `peer` as the caller, and reads the first item of its answer. Returns `None` if the bytes
        /// are not a message.
        async fn call(service: &ControlService, peer: &Peer, method: u8, message: &[u8]) -> Option<Result<(), Status>> {
            let mut number = 0..;
            $(if number.next() == Some(method) {
                let request = v1::$request::decode(message).ok()?;
                return Some(service.$unary(from(peer, request)).await.map(drop));
            })*
            $(if number.next() == Some(method) {
                let request = v1::$watched::decode(message).ok()?;
                return Some(service.$watch(from(peer, request)).await.and_then(first));
            })*
            None
        }
    };
}

methods! {
    get_policy(GetPolicyRequest) list_revisions(ListRevisionsRequest) set_policy(SetPolicyRequest)
    confirm_policy(ConfirmPolicyRequest) rollback_policy(RollbackPolicyRequest)
    forget_saved_policy(ForgetSavedPolicyRequest) reload(ReloadRequest) get_status(GetStatusRequest)
    list_tunnels(ListTunnelsRequest) list_connections(ListConnectionsRequest) list_engines(ListEnginesRequest) list_paths(ListPathsRequest) move_edge(MoveEdgeRequest) list_requests(ListRequestsRequest)
    close_tunnel(CloseTunnelRequest)
    set_tunnel_class(SetTunnelClassRequest);
    watch_stats(WatchStatsRequest) watch_events(WatchEventsRequest) watch_departures(WatchDeparturesRequest)
    watch_qlog(WatchQlogRequest)
}

fn from<T>(peer: &Peer, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.extensions_mut().insert(peer.clone());
    request
}

/// Reads the item of a stream that is ready at once, if any.
fn first<T>(answer: Response<impl Stream<Item = Result<T, Status>> + Unpin>) -> Result<(), Status> {
    answer.into_inner().next().now_or_never().flatten().transpose().map(drop)
}
