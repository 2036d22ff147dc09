//! Keeps the daemon's name on the bus, and signals events and changes of properties to all callers there.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context as _, Result};
use config::control::Bus;
use role::access::record::{AccessRecord, Value};
use zbus::{
    connection,
    fdo::{DBusProxy, RequestNameFlags},
    object_server::InterfaceRef,
};

use super::{
    super::{Happening, SharedControl, Writers},
    Door,
    watchers::EndsAll,
};
use crate::policy::InForce;

const NAME: &str = "org.paced.Paced1";
const PATH: &str = "/org/paced/Paced1";

/// The pause before a failed door is tried again, and between two checks that an open one still has its bus.
const PAUSE: Duration = Duration::from_secs(10);

/// Keeps the door open on a bus; never returns. If there is no such bus, or the bus refuses this process the name, it
/// logs that once, and tries again.
pub async fn keep(control: SharedControl, bus: Bus, writers: Writers) {
    let mut told = None;
    loop {
        // A guard ends the watches, because a reload that shuts the door drops this task while it serves.
        let watches = EndsAll::default();
        let door = Door { control: control.clone(), writers: writers.clone(), watchers: watches.0.clone() };
        let error = match serve(door, &bus).await {
            Ok(()) => "the bus is gone".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        drop(watches);
        if told.as_ref() != Some(&error) {
            tracing::warn!("cannot serve D-Bus: {error}");
            told = Some(error);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Serves on a bus until it is gone.
async fn serve(door: Door, bus: &Bus) -> Result<()> {
    let control = door.control.clone();
    // The watch begins before a caller can see the name or read the first values: callers count on every change from then on.
    // Without addresses, because signals go to all callers that may receive any.
    let mut events = control.events(&[], None);
    let mut policies = control.policies.watch();
    let mut last = policies.borrow_and_update().clone();
    let builder = match bus {
        Bus::System => connection::Builder::system(),
        Bus::Address(address) => connection::Builder::address(address.as_str()),
    };
    let failed = || format!("failed to become {NAME} on the bus {bus}");
    let connection = builder.serve_at(PATH, door).build().await.with_context(failed)?;
    // Queueing for the name would hide that another process owns it.
    connection.request_name_with_flags(NAME, RequestNameFlags::DO_NOT_QUEUE).await.with_context(failed)?;
    tracing::info!(%bus, name = NAME, "on D-Bus");
    let door = connection.object_server().interface::<_, Door>(PATH).await.context("the door was just made")?;
    loop {
        let (kind, message) = tokio::select! {
            event = events.next() => match event {
                Some(Happening::Event(event)) => (event.kind, event.message),
                Some(Happening::Access(record)) => {
                    Door::access(door.signal_emitter(), record.event(), fields(&record)).await?;
                    continue;
                }
                Some(Happening::Lost(count)) => ("lost", format!("{count} events came faster than they were sent")),
                None => return Ok(()),
            },
            Ok(()) = policies.changed() => {
                let former = std::mem::replace(&mut last, policies.borrow_and_update().clone());
                announce(&door, &former, &last).await?;
                continue;
            }
            () = tokio::time::sleep(PAUSE) => {
                // If this call fails, the bus is gone.
                DBusProxy::new(&connection).await?.get_id().await?;
                continue;
            }
        };
        Door::event(door.signal_emitter(), kind, &message).await?;
    }
}

/// Tells all callers the new values of the properties that have changed. Of the policy, it tells only that it has changed:
/// only readers may see the text, and the bus may pass signals to other programs.
async fn announce(door: &InterfaceRef<Door>, former: &InForce, now: &InForce) -> zbus::Result<()> {
    let (this, emitter) = (door.get().await, door.signal_emitter());
    if now.revision.number != former.revision.number {
        this.revision_changed(emitter).await?;
    }
    if now.revision.text != former.revision.text {
        this.policy_invalidate(emitter).await?;
    }
    if now.is_saved != former.is_saved {
        this.saved_changed(emitter).await?;
    }
    Ok(())
}

/// Converts a record to the signal's fields.
fn fields(record: &AccessRecord) -> HashMap<String, zbus::Variant<'_>> {
    let value = |value| match value {
        Value::Number(number) => number.into(),
        Value::Text(text) => text.into_owned().into(),
    };
    record.fields().into_iter().map(|(key, found)| (key.into_owned(), value(found))).collect()
}

#[cfg(test)]
mod tests {
    use std::{os::fd::OwnedFd, sync::Arc};

    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
    use zbus::{
        Message,
        connection::socket::{ReadHalf, Socket, Split, WriteHalf},
    };

    use super::*;
    use crate::{control::tests::control, policy::Submission};

    /// A connection to a bus that says nothing and hears everything.
    struct Wire(Outgoing);

    #[derive(Debug)]
    struct Silence;

    #[derive(Debug)]
    struct Outgoing(UnboundedSender<Message>);

    impl Socket for Wire {
        type ReadHalf = Silence;
        type WriteHalf = Outgoing;

        fn split(self) -> Split<Silence, Outgoing> {
            Split::new(Silence, self.0)
        }
    }

    #[tonic::async_trait]
    impl ReadHalf for Silence {
        async fn receive_message(&mut self, _: u64, _: &mut Vec<u8>, _: &mut Vec<OwnedFd>) -> zbus::Result<Message> {
            std::future::pending().await
        }
    }

    #[tonic::async_trait]
    impl WriteHalf for Outgoing {
        async fn send_message(&mut self, message: &Message) -> zbus::Result<()> {
            _ = self.0.send(message.clone());
            Ok(())
        }

        async fn close(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_change_of_the_policy_is_signalled_without_its_text() {
        let (control, _wishes) = control("");
        let former = control.in_force();
        let (writers, watchers) = (Writers::new(&[]), Arc::default());
        let door = Door { control: Arc::new(control.clone()), writers, watchers };
        let (outgoing, mut said) = unbounded_channel();
        let (wire, guid) = (Wire(Outgoing(outgoing)), "0123456789abcdef0123456789abcdef");
        let connection =
            connection::Builder::authenticated_socket(wire, guid).serve_at(PATH, door).build().await.unwrap();
        let text = "[class.secret]\n".to_owned();
        control.policies.submit(Submission { text, ..Submission::default() }).unwrap();
        let door = connection.object_server().interface::<_, Door>(PATH).await.unwrap();
        announce(&door, &former, &control.in_force()).await.unwrap();
        for property in ["Revision", "Policy"] {
            let signal = said.recv().await.unwrap();
            let signal = String::from_utf8_lossy(signal.data()).into_owned();
            assert!(signal.contains("PropertiesChanged") && signal.contains(property), "{signal:?}");
            assert!(!signal.contains("secret"), "{signal:?}");
        }
    }
}
