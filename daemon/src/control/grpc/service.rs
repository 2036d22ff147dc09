//! Translates each call of the protocol to a call of [`Control`](crate::control::Control), and its outcome to a message.

use std::{pin::Pin, sync::Arc, time::Duration};

use api::v1;
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt as _};
use uplink::Destination;

use super::{
    super::{Caller, Error, ErrorKind, Filter, Page, PartView, SharedControl, caller::Peer, stats::stats_ticks},
    events,
    messages::{
        alias, certificate, connection, departures, engine, entrance, model_request, path, revision, stats, tunnel,
        uplink,
    },
};
use crate::policy::{PolicyRefusal, Revision, Submission};

/// How many of the errors in a text are listed one by one.
const VIOLATIONS: usize = 16;

/// How often records are sent: often enough that only a small part of the buffers fills in between.
const RECORDS: Duration = Duration::from_millis(50);

/// The protocol's service.
pub struct ControlService(SharedControl);

impl ControlService {
    /// Returns the service for a control plane. Each request must have its [`Peer`] as an extension.
    #[must_use]
    pub const fn new(control: SharedControl) -> Self {
        Self(control)
    }
}

type Answer<T> = Result<Response<T>, Status>;
type Sent<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl v1::control_service_server::ControlService for ControlService {
    type WatchStatsStream = Sent<v1::WatchStatsResponse>;
    type WatchEventsStream = Sent<v1::WatchEventsResponse>;
    type WatchDeparturesStream = Sent<v1::WatchDeparturesResponse>;
    type WatchQlogStream = Sent<v1::WatchQlogResponse>;

    async fn get_policy(&self, request: Request<v1::GetPolicyRequest>) -> Answer<v1::GetPolicyResponse> {
        let found = self.0.revision(request.into_inner().revision);
        let (found, confirm_by) = found.map_err(|error| status(&error))?;
        let saved = self.0.in_force().is_saved;
        answer(v1::GetPolicyResponse { revision: Some(revision(&found, confirm_by)), saved })
    }

    async fn list_revisions(&self, _: Request<v1::ListRevisionsRequest>) -> Answer<v1::ListRevisionsResponse> {
        let in_force = self.0.in_force();
        let number = in_force.revision.number;
        let listed = |found: &Arc<Revision>| {
            let confirm_by = in_force.confirm_by().filter(|_| found.number == number);
            v1::Revision { text: String::new(), ..revision(found, confirm_by) }
        };
        let revisions = in_force.revisions.iter().map(listed).collect();
        answer(v1::ListRevisionsResponse { revisions, revision: number })
    }

    async fn set_policy(&self, request: Request<v1::SetPolicyRequest>) -> Answer<v1::SetPolicyResponse> {
        let caller = caller(&request)?;
        let v1::SetPolicyRequest { text, expected_revision, dry_run, confirm_within, save } = request.into_inner();
        let confirm_within = confirm_within.map(Duration::try_from).transpose();
        let confirm_within = confirm_within.map_err(|_| Status::invalid_argument("confirm_within is negative"))?;
        let expected = Some(expected_revision);
        let submission = Submission { text, author: String::new(), expected, dry_run, confirm_within, save };
        let accepted = self.0.set_policy(&caller, submission).await.map_err(|error| status(&error))?;
        answer(v1::SetPolicyResponse { revision: Some(revision(&accepted.revision, accepted.confirm_by)) })
    }

    async fn confirm_policy(&self, request: Request<v1::ConfirmPolicyRequest>) -> Answer<v1::ConfirmPolicyResponse> {
        let caller = caller(&request)?;
        let v1::ConfirmPolicyRequest { revision: number, save } = request.into_inner();
        let confirmed = self.0.confirm_policy(&caller, number, save).await.map_err(|error| status(&error))?;
        answer(v1::ConfirmPolicyResponse { revision: Some(revision(&confirmed, None)) })
    }

    async fn rollback_policy(&self, request: Request<v1::RollbackPolicyRequest>) -> Answer<v1::RollbackPolicyResponse> {
        let caller = caller(&request)?;
        let v1::RollbackPolicyRequest { revision: number, save, expected_revision } = request.into_inner();
        let accepted = self.0.roll_back(&caller, number, expected_revision, save).await;
        let accepted = accepted.map_err(|error| status(&error))?;
        answer(v1::RollbackPolicyResponse { revision: Some(revision(&accepted.revision, None)) })
    }

    async fn forget_saved_policy(
        &self,
        request: Request<v1::ForgetSavedPolicyRequest>,
    ) -> Answer<v1::ForgetSavedPolicyResponse> {
        let forgotten = self.0.forget_saved(&caller(&request)?).await.map_err(|error| status(&error))?;
        answer(v1::ForgetSavedPolicyResponse { forgotten })
    }

    async fn reload(&self, request: Request<v1::ReloadRequest>) -> Answer<v1::ReloadResponse> {
        let revision = self.0.reload(&caller(&request)?).await.map_err(|error| status(&error))?;
        answer(v1::ReloadResponse { revision, saved: self.0.in_force().is_saved })
    }

    async fn get_status(&self, request: Request<v1::GetStatusRequest>) -> Answer<v1::GetStatusResponse> {
        let caller = caller(&request)?;
        let (facts, in_force) = (self.0.facts(), self.0.in_force());
        let (connections, tunnels) = self.0.counts();
        let part = |PartView { device, part, is_enforced: enforced, detail }| v1::Enforcement {
            device,
            part: part.to_owned(),
            enforced,
            detail,
        };
        let features = self.0.features();
        let features = features.rows().into_iter().map(|(name, found)| v1::Feature {
            name: name.to_owned(),
            state: found.state.to_string(),
            detail: found.why.to_string(),
        });
        answer(v1::GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: Some(facts.started.into()),
            revision: in_force.revision.number,
            saved: in_force.is_saved,
            confirm_by: in_force.confirm_by().map(Into::into),
            listeners: facts.listeners.clone(),
            forwards: facts.forwards.iter().map(|forward| forward.text(&caller)).collect(),
            workers: facts.workers.into(),
            connections,
            tunnels,
            enforcement: self.0.enforcement().into_iter().map(part).collect(),
            features: features.collect(),
            uplinks: self.0.uplinks(&caller).into_iter().map(uplink).collect(),
            entrances: self.0.entrances().iter().map(|found| entrance(found)).collect(),
            aliases: self.0.aliases(&caller).into_iter().map(alias).collect(),
            writable: caller.may_write,
            pid: std::process::id(),
            certificates: facts.certificates.iter().map(certificate).collect(),
            draining: self.0.is_draining(),
            gateway_listeners: facts.gateway_listeners.clone(),
        })
    }

    async fn list_tunnels(&self, request: Request<v1::ListTunnelsRequest>) -> Answer<v1::ListTunnelsResponse> {
        let caller = caller(&request)?;
        let v1::ListTunnelsRequest { page_size, page_token, class, user, connection } = request.into_inner();
        let filter = Filter {
            class: Some(class).filter(|class| !class.is_empty()),
            user: Some(user).filter(|user| !user.is_empty()),
            connection: Some(connection).filter(|id| *id > 0),
        };
        let Page { rows, next } = self.0.tunnels(&caller, &filter, after(&page_token)?, page_size as usize);
        let tunnels = rows.into_iter().map(tunnel).collect();
        answer(v1::ListTunnelsResponse { tunnels, next_page_token: token(next) })
    }

    async fn list_connections(
        &self,
        request: Request<v1::ListConnectionsRequest>,
    ) -> Answer<v1::ListConnectionsResponse> {
        let caller = caller(&request)?;
        let v1::ListConnectionsRequest { page_size, page_token } = request.into_inner();
        let Page { rows, next } = self.0.connections(&caller, after(&page_token)?, page_size as usize);
        let connections = rows.into_iter().map(connection).collect();
        answer(v1::ListConnectionsResponse { connections, next_page_token: token(next) })
    }

    async fn list_requests(&self, request: Request<v1::ListRequestsRequest>) -> Answer<v1::ListRequestsResponse> {
        caller(&request)?;
        let v1::ListRequestsRequest { page_size, page_token } = request.into_inner();
        let Page { rows, next } = self.0.requests(after(&page_token)?, page_size as usize);
        let requests = rows.into_iter().map(model_request).collect();
        answer(v1::ListRequestsResponse { requests, next_page_token: token(next) })
    }

    async fn list_paths(&self, _: Request<v1::ListPathsRequest>) -> Answer<v1::ListPathsResponse> {
        answer(v1::ListPathsResponse { paths: self.0.paths().into_iter().map(path).collect() })
    }

    async fn move_edge(&self, request: Request<v1::MoveEdgeRequest>) -> Answer<v1::MoveEdgeResponse> {
        let caller = caller(&request)?;
        let v1::MoveEdgeRequest { relay, path } = request.into_inner();
        let to = match (relay.is_empty(), path.is_empty()) {
            (true, true) => None,
            (false, true) => Some(Destination::Relay(relay)),
            (true, false) => Some(Destination::Path(path)),
            (false, false) => return Err(Status::invalid_argument("the request names a relay and a path; name one")),
        };
        let tunnels = self.0.move_edge(&caller, to.as_ref()).await.map_err(|error| status(&error))?;
        answer(v1::MoveEdgeResponse { tunnels: u32::try_from(tunnels).unwrap_or(u32::MAX) })
    }

    async fn list_engines(&self, request: Request<v1::ListEnginesRequest>) -> Answer<v1::ListEnginesResponse> {
        let caller = caller(&request)?;
        let engines = self.0.engines(&caller).into_iter().map(engine).collect();
        let aliases = self.0.aliases(&caller).into_iter().map(alias).collect();
        answer(v1::ListEnginesResponse { engines, aliases })
    }

    async fn close_tunnel(&self, request: Request<v1::CloseTunnelRequest>) -> Answer<v1::CloseTunnelResponse> {
        let caller = caller(&request)?;
        self.0.close_tunnel(&caller, request.into_inner().tunnel).map_err(|error| status(&error))?;
        answer(v1::CloseTunnelResponse {})
    }

    async fn set_tunnel_class(
        &self,
        request: Request<v1::SetTunnelClassRequest>,
    ) -> Answer<v1::SetTunnelClassResponse> {
        let caller = caller(&request)?;
        let v1::SetTunnelClassRequest { tunnel: id, class } = request.into_inner();
        let changed = self.0.set_tunnel_class(&caller, id, class).map_err(|error| status(&error))?;
        answer(v1::SetTunnelClassResponse { tunnel: Some(tunnel(changed)) })
    }

    async fn watch_stats(&self, request: Request<v1::WatchStatsRequest>) -> Answer<Self::WatchStatsStream> {
        let place = self.0.watch(&caller(&request)?).map_err(|error| status(&error))?;
        let interval = request.into_inner().interval.map(Duration::try_from).transpose();
        let interval = interval.map_err(|_| Status::invalid_argument("interval is negative"))?;
        let state = (stats_ticks(interval), self.0.clone(), place);
        let sent = futures::stream::unfold(state, |(mut ticks, control, place)| async {
            ticks.tick().await;
            Some((Ok(stats(&control.statistics())), (ticks, control, place)))
        });
        answer(Box::pin(sent))
    }

    async fn watch_events(&self, request: Request<v1::WatchEventsRequest>) -> Answer<Self::WatchEventsStream> {
        let peer = peer(&request)?.clone();
        let place = self.0.watch(&peer.caller()).map_err(|error| status(&error))?;
        let events = self.0.events(&request.into_inner().kinds, Some(peer));
        let sent = futures::stream::unfold((events, place), |(mut events, place)| async {
            let happening = events.next().await?;
            Some((Ok(events::response(happening)), (events, place)))
        });
        answer(Box::pin(sent))
    }

    async fn watch_departures(
        &self,
        request: Request<v1::WatchDeparturesRequest>,
    ) -> Answer<Self::WatchDeparturesStream> {
        let caller = caller(&request)?;
        let span = span(request.into_inner().duration)?;
        let recording = self.0.record_departures(&caller, span).map_err(|error| status(&error))?;
        let (control, ticks) = (self.0.clone(), tokio::time::interval(RECORDS));
        let sent = futures::stream::unfold(Some((recording, ticks)), move |state| {
            let control = control.clone();
            async move {
                let (recording, mut ticks) = state?;
                ticks.tick().await;
                // Checked before taking, so that the last answer contains all remaining records.
                let is_over = recording.is_over();
                let records = departures(&control, recording.take());
                Some((Ok(records), (!is_over).then_some((recording, ticks))))
            }
        });
        answer(Box::pin(sent))
    }

    async fn watch_qlog(&self, request: Request<v1::WatchQlogRequest>) -> Answer<Self::WatchQlogStream> {
        let caller = caller(&request)?;
        let v1::WatchQlogRequest { connection, duration } = request.into_inner();
        let sequence = self.0.record_qlog(&caller, connection, span(duration)?).map_err(|error| status(&error))?;
        let (control, ticks) = (self.0.clone(), tokio::time::interval(RECORDS));
        let sent = futures::stream::unfold(Some((sequence, ticks)), move |state| {
            let control = control.clone();
            async move {
                let (mut sequence, mut ticks) = state?;
                if !sequence.has_more() {
                    ticks.tick().await;
                }
                let (records, goes_on) = sequence.text(control.qlog_names(connection));
                Some((Ok(v1::WatchQlogResponse { records }), goes_on.then_some((sequence, ticks))))
            }
        });
        answer(Box::pin(sent))
    }
}

/// Returns how long to record; ten seconds if the request does not say.
fn span(duration: Option<prost_types::Duration>) -> Result<Duration, Status> {
    let span = duration.map_or(Ok(Duration::from_secs(10)), Duration::try_from);
    span.map_err(|_| Status::invalid_argument("duration is negative"))
}

fn answer<T>(message: T) -> Answer<T> {
    Ok(Response::new(message))
}

fn caller<T>(request: &Request<T>) -> Result<Caller, Status> {
    peer(request).map(Peer::caller)
}

fn peer<T>(request: &Request<T>) -> Result<&Peer, Status> {
    let peer = request.extensions().get::<Peer>();
    peer.ok_or_else(|| Status::unauthenticated("the caller is unknown"))
}

fn after(page_token: &str) -> Result<u64, Status> {
    if page_token.is_empty() {
        return Ok(0);
    }
    page_token.parse().map_err(|_| Status::invalid_argument("the page token does not belong to this list; omit it"))
}

fn token(next: Option<u64>) -> String {
    next.map(|next| next.to_string()).unwrap_or_default()
}

/// Returns the answer to a call that failed.
pub(super) fn status(error: &Error) -> Status {
    let code = match error.kind() {
        ErrorKind::Denied => Code::PermissionDenied,
        ErrorKind::Unknown => Code::NotFound,
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::Stale => Code::Aborted,
        ErrorKind::Trial | ErrorKind::NotNow => Code::FailedPrecondition,
        ErrorKind::Busy => Code::ResourceExhausted,
        ErrorKind::Ending => Code::Unavailable,
        ErrorKind::Failed => Code::Internal,
    };
    let details = match error {
        Error::Policy(PolicyRefusal::Invalid(errors)) => {
            let violation = |error: &config::error::Error| FieldViolation {
                field: format!("{}:{} {}", error.line, error.column, error.key),
                description: error.problem.to_string(),
                ..FieldViolation::default()
            };
            ErrorDetails::with_bad_request(errors.iter().take(VIOLATIONS).map(violation).collect::<Vec<_>>())
        }
        _ => ErrorDetails::with_error_info(error.label(), "paced.org", std::collections::HashMap::new()),
    };
    Status::with_error_details(code, error.message(), details)
}
