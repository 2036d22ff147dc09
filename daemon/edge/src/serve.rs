//! A local address for clients of the OpenAI API, whose requests go to a gateway over the connections that all local
//! addresses share.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use config::serve::Serve;
use masque::h3::RequestHead;
use quic::{
    class::{Membership, Since, Terms},
    h3::Request,
};
use serving::entrance::{self, Limits};
use tokio::time::timeout;

use super::{
    Counters,
    client::{FirstRequest, endpoint::ANSWER_TIMEOUT},
    connect::{NoConnection, Way},
    door::Door,
    link::Link,
    uplink::Uplink,
};

/// A local address, and the clients that are connected to it.
pub struct Clients {
    door: Door,
    way: Arc<ToGateway>,
    limits: Limits,
}

/// How requests of one local address get to the gateway.
struct ToGateway(Way);

impl Clients {
    /// Serves `serve` on a listener that [`door::bind`](super::door::bind) made, through `uplink`; what is sent is of the class
    /// of `membership`.
    ///
    /// # Errors
    /// The system refuses to watch the listener.
    pub fn new(
        listener: TcpListener,
        serve: &Serve,
        membership: Membership,
        uplink: Arc<Uplink>,
        counters: Arc<Counters>,
    ) -> io::Result<Self> {
        let (is_chosen, idle) = (serve.class.is_some(), serve.idle);
        let door = Door::new(listener, serve.max_connections, counters.clone())?;
        let way = Way { uplink, membership, is_chosen, idle, counters, told: Default::default() };
        Ok(Self {
            door,
            way: Arc::new(ToGateway(way)),
            limits: Limits { max_body_bytes: serve.max_body_bytes as usize, idle },
        })
    }

    /// The address that was bound.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.door.address()
    }

    /// Serves clients until dropped, which ends their connections.
    pub async fn run(mut self) {
        loop {
            let (stream, _, place) = self.door.next().await;
            // Tokens leave as they come.
            _ = stream.set_nodelay(true);
            let (way, limits) = (self.way.clone(), self.limits);
            self.door.spawn(async move {
                entrance::serve(stream, &*way, limits).await;
                drop(place);
            });
        }
    }
}

impl entrance::Way for ToGateway {
    type Place = (Link, FirstRequest);

    async fn ask(&self, head: RequestHead) -> Result<(Request, Self::Place), String> {
        let Self(way) = self;
        let asking = async {
            let (link, class) = way.place().await?;
            let signal = way.signal(&class);
            let mut head = head;
            if head.field("priority").is_none() {
                head.fields.extend(signal.as_ref().and_then(masque::priority::Priority::to_field));
            }
            let (request, first) = link.relay.ask_itself(head).await.map_err(NoConnection::Lost)?;
            request.set_terms(&Terms { since: Since::First, ..class.terms(None) });
            Ok((request, (link, first)))
        };
        let asked = timeout(ANSWER_TIMEOUT, asking).await.unwrap_or(Err(NoConnection::NoAnswer));
        match &asked {
            Ok(_) => _ = way.counters.tunnels_opened.inc(),
            Err(error) => way.refused(error),
        }
        asked.map_err(|error: NoConnection| error.to_string())
    }

    fn answered(&self, (link, _): &Self::Place, status: Option<u16>) {
        // Without credentials that the gateway takes, it takes us for a stranger. 401 is about the client's own key.
        if status.is_some_and(|status| status != 407) {
            link.relay.let_in();
        }
    }
}
