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
    waiting::WaitingCalls,
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
        // A guard ends the watches and the waiting calls, because a reload that shuts the door drops this task while it serves.
        let watches = EndsAll::default();
        let (control, writers, watchers) = (control.clone(), writers.clone(), watches.0.clone());
        let door = Door { control, writers, watchers, waiting: WaitingCalls::default() };
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
    if now.confirm_by() != former.confirm_by() {
        this.confirm_by_us_changed(emitter).await?;
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
    use std::sync::Arc;

    use config::policy::MAX_TEXT_BYTES;
    use tokio::time::timeout;
    use zbus::{Message, object_server::Interface};

    use super::{
        super::{micros, waiting::ARRIVING, wire},
        *,
    };
    use crate::{
        control::{Control, tests::control},
        policy::Submission,
    };

    fn door(control: &Arc<Control>) -> Door {
        let (writers, watchers) = (Writers::new(&[]), Arc::default());
        Door { control: Arc::new(control.clone()), writers, watchers, waiting: WaitingCalls::default() }
    }

    #[tokio::test]
    async fn calls_with_long_texts_that_wait_for_the_bus_are_bounded() {
        let (control, _wishes) = control("");
        let (builder, calls, mut said) = wire::silent_bus();
        let _connection = builder.serve_at(PATH, door(&control)).build().await.unwrap();
        let set = |bytes: usize| {
            let call = Message::method_call(PATH, "SetPolicy").interface("org.paced.Control1");
            let options = HashMap::<&str, zbus::Variant<'_>>::new();
            calls.send(call.sender(":1.7").build(&("x".repeat(bytes), options)).unwrap()).unwrap();
        };
        // Longer than a message may be, and than a policy may be.
        for bytes in [2 * MAX_TEXT_BYTES, MAX_TEXT_BYTES + 1] {
            set(bytes);
            let answer = said.recv().await.unwrap();
            assert_eq!(answer.header().error_name().unwrap().as_str(), "org.paced.Error.Invalid", "{answer:?}");
        }
        // The bus never says who calls.
        for _ in 0..=ARRIVING.1 {
            set(MAX_TEXT_BYTES);
        }
        let mut questions = 0;
        let refusal = loop {
            let message = timeout(PAUSE, said.recv()).await.expect("a call too many is refused").unwrap();
            match message.header().member() {
                Some(member) => questions += usize::from(member.as_str() == "GetConnectionUnixUser"),
                None => break message.body().deserialize::<String>().unwrap(),
            }
        };
        assert_eq!((questions, &refusal[..]), (ARRIVING.1, "32 other calls wait to be identified; try again"));
    }

    #[tokio::test]
    async fn calls_that_wait_for_the_bus_or_for_polkit_end_with_the_door_and_let_go_of_the_bus() {
        for asked in ["GetConnectionUnixUser", "CheckAuthorization"] {
            let (control, _wishes) = control("");
            let (builder, calls, mut said) = wire::silent_bus();
            let door = door(&control);
            let watches = EndsAll(door.watchers.clone());
            let connection = builder.serve_at(PATH, door).build().await.unwrap();
            let call = Message::method_call(PATH, "ForgetSavedPolicy").interface("org.paced.Control1");
            calls.send(call.sender(":1.7").build(&()).unwrap()).unwrap();
            let question = said.recv().await.unwrap();
            if asked != question.header().member().unwrap().as_str() {
                // No user who may write, so that polkit decides.
                calls.send(Message::method_return(&question.header()).build(&65_533_u32).unwrap()).unwrap();
                assert_eq!(said.recv().await.unwrap().header().member().unwrap().as_str(), asked);
            }
            // As a reload does that shuts the door: it drops the task that keeps it.
            drop((connection, watches));
            let answer = timeout(PAUSE, said.recv()).await.expect("the call ends").unwrap();
            assert_eq!(answer.body().deserialize::<String>().unwrap(), "paced has left the bus");
            let rest = timeout(PAUSE, said.recv()).await.expect("the connection ends");
            assert!(rest.is_none(), "{rest:?}");
        }
    }

    #[tokio::test]
    async fn a_change_of_the_policy_is_signalled_without_its_text() {
        let (control, _wishes) = control("");
        let former = control.in_force();
        let (builder, _calls, mut said) = wire::silent_bus();
        let connection = builder.serve_at(PATH, door(&control)).build().await.unwrap();
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

    #[tokio::test]
    async fn the_end_of_a_trial_is_a_property_that_changes_as_the_trial_begins_and_ends() {
        let (control, _wishes) = control("");
        let (builder, _calls, mut said) = wire::silent_bus();
        let connection = builder.serve_at(PATH, door(&control)).build().await.unwrap();
        let door = connection.object_server().interface::<_, Door>(PATH).await.unwrap();
        let mut changes = async |former: InForce| {
            announce(&door, &former, &control.in_force()).await.unwrap();
            let mut changed = Vec::new();
            while let Ok(signal) = said.try_recv() {
                type Changed = (String, HashMap<String, zbus::OwnedVariant>, Vec<String>);
                let (_, values, _): Changed = signal.body().deserialize().unwrap();
                changed.extend(values.into_iter().filter_map(|(key, value)| Some((key, u64::try_from(value).ok()?))));
            }
            changed
        };
        let former = control.in_force();
        assert_eq!(door.get().await.confirm_by_us().await, 0);
        let text = "[class.one]\n".to_owned();
        let trial = Submission { text, confirm_within: Some(PAUSE), ..Submission::default() };
        let end = micros(control.policies.submit(trial).unwrap().confirm_by.unwrap());
        assert_eq!(door.get().await.confirm_by_us().await, end);
        assert_eq!(changes(former).await, [("Revision".to_owned(), 2), ("ConfirmByUs".to_owned(), end)]);
        let former = control.in_force();
        control.policies.confirm(2, false).unwrap();
        assert_eq!(changes(former).await, [("ConfirmByUs".to_owned(), 0)]);
    }

    #[test]
    fn the_interface_is_as_its_installed_description_says() {
        let (control, _wishes) = control("");
        let mut own = String::new();
        Interface::introspect_to_writer(&door(&control), &mut own, 0);
        let lines = |text: &str| {
            let begin = text.find("<interface name=\"org.paced.Control1\">").unwrap();
            let end = text.find("</interface>").unwrap();
            text[begin..end]
                .lines()
                .map(|line| line.trim().to_owned())
                .filter(|line| !line.is_empty())
                .collect::<Vec<_>>()
        };
        let installed = include_str!("../../../../systemd/org.paced.Control1.xml");
        assert_eq!(lines(&own), lines(installed));
    }
}
