//! Bounds what calls over D-Bus may make the daemon hold while they wait: until the bus has identified their callers, and until polkit(8)
//! has decided whether these may write. zbus serves each call in a task of its own, which keeps the message.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context as _, Result};
use api::{REQUEST_BYTES, SHORT_REQUEST_BYTES};
use role::limits::{Gauge, GaugePlace, PerUser};
use tokio::time::timeout;
use zbus::{
    Connection,
    message::{Flags, Header},
};
use zbus_polkit::policykit1::{AuthorityProxy, CheckAuthorizationFlags, Subject};

use super::denial::Denial;

/// The action that polkit decides on.
const ACTION: &str = "org.paced.Paced1.write";

/// How many calls may wait at once until their callers are identified, and how many of calls that set a policy.
pub(super) const ARRIVING: (usize, usize) = (256, 32);

/// How many calls may wait at once for polkit, which may ask a person for a password: in all, and of one user.
const DECIDING: (usize, usize) = (16, 4);

/// How long polkit may take, with the person that it asks.
const DECIDES_WITHIN: Duration = Duration::from_secs(120);

/// The calls that wait.
#[derive(Debug, Default)]
pub(super) struct WaitingCalls {
    short: Gauge,
    long: Gauge,
    deciding: Gauge,
    /// Of each user.
    shares: PerUser,
}

impl WaitingCalls {
    /// Gives a call a place until its caller is identified.
    ///
    /// # Errors
    /// Its message is too long, or too many calls wait.
    pub(super) fn short(&self, header: &Header<'_>) -> Result<GaugePlace, Denial> {
        enter(&self.short, ARRIVING.0, header, SHORT_REQUEST_BYTES)
    }

    /// The same for a call that sets a policy.
    ///
    /// # Errors
    /// As for [`WaitingCalls::short`].
    pub(super) fn long(&self, header: &Header<'_>) -> Result<GaugePlace, Denial> {
        enter(&self.long, ARRIVING.1, header, REQUEST_BYTES)
    }

    /// Gives a call of a user the places that it needs until polkit has decided.
    ///
    /// # Errors
    /// Too many calls wait for polkit, in all or of this user.
    pub(super) fn decision(&self, user: &str) -> Result<[GaugePlace; 2], Denial> {
        let (all, each) = DECIDING;
        let refused = |whose: String| Denial::Failed(format!("{whose} wait for polkit to authorise them; try again"));
        let share = self.shares.take(&user.into(), each);
        let share = share.ok_or_else(|| refused(format!("{each} other calls of {user:?}")))?;
        Ok([share, self.deciding.take(all).ok_or_else(|| refused(format!("{all} other calls")))?])
    }
}

fn enter(gauge: &Gauge, most: usize, header: &Header<'_>, longest_bytes: usize) -> Result<GaugePlace, Denial> {
    let bytes = header.primary().body_len();
    if usize::try_from(bytes).map_or(true, |bytes| bytes > longest_bytes) {
        return Err(Denial::Invalid(format!(
            "the message has {bytes} bytes, and this call takes at most {longest_bytes}"
        )));
    }
    gauge.take(most).ok_or_else(|| Denial::Failed(format!("{most} other calls wait to be identified; try again")))
}

/// Asks polkit whether a caller may write; polkit may ask for a password if the call permits interaction.
///
/// # Errors
/// Polkit cannot be asked, or does not decide in time.
pub(super) async fn is_authorized(header: &Header<'_>, connection: &Connection) -> Result<bool> {
    let subject = Subject::new_for_message_header(header)?;
    let asks = header.primary().flags().contains(Flags::ALLOW_INTERACTIVE_AUTH);
    let flags = if asks { CheckAuthorizationFlags::ALLOW_USER_INTERACTION } else { CheckAuthorizationFlags::empty() };
    let polkit = AuthorityProxy::new(connection).await?;
    // Of all calls, only this one has both.
    let id = format!("{:?} {}", header.sender(), header.primary().serial_num());
    let details = HashMap::new();
    let decided = timeout(DECIDES_WITHIN, polkit.check_authorization(&subject, ACTION, &details, flags, &id)).await;
    if decided.is_err() {
        // Otherwise polkit goes on asking the person.
        polkit.inner().call_noreply("CancelCheckAuthorization", &(&id,)).await?;
    }
    let limit = || format!("polkit has not decided within {} s", DECIDES_WITHIN.as_secs());
    Ok(decided.with_context(limit)??.is_authorized)
}

#[cfg(test)]
mod tests {
    use zbus::Message;

    use super::{super::wire, *};

    fn call(bytes: usize) -> Message {
        let call = Message::method_call("/", "SetPolicy").sender(":1.7");
        call.build(&"x".repeat(bytes)).unwrap()
    }

    #[test]
    fn a_message_that_is_too_long_for_its_call_does_not_wait() {
        let waiting = WaitingCalls::default();
        for (bytes, fits) in [(100, [true; 2]), (SHORT_REQUEST_BYTES, [false, true]), (REQUEST_BYTES, [false; 2])] {
            let message = call(bytes);
            let header = message.header();
            assert_eq!([waiting.short(&header), waiting.long(&header)].map(|place| place.is_ok()), fits, "{bytes}");
        }
        assert_eq!((waiting.short.count(), waiting.long.count()), (0, 0));
    }

    #[test]
    fn calls_that_wait_for_polkit_are_bounded_for_each_user_and_in_all() {
        let waiting = WaitingCalls::default();
        let (all, each) = DECIDING;
        let mut held: Vec<_> = (0..each).map(|_| waiting.decision("alice").unwrap()).collect();
        let refused = |user: &str| waiting.decision(user).unwrap_err().to_string();
        assert!(refused("alice").contains("4 other calls of \"alice\" wait for polkit"), "{}", refused("alice"));
        held.extend((each..all).map(|number| waiting.decision(&format!("user {number}")).unwrap()));
        assert!(refused("bob").contains("16 other calls wait for polkit"), "{}", refused("bob"));
        held.remove(0);
        waiting.decision("alice").unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_decision_that_polkit_does_not_make_is_given_up_and_cancelled() {
        let (builder, _calls, mut said) = wire::silent_bus();
        let connection = builder.build().await.unwrap();
        let begin = tokio::time::Instant::now();
        let message = call(1);
        let error = is_authorized(&message.header(), &connection).await.unwrap_err().to_string();
        assert_eq!((&error[..], begin.elapsed().as_secs()), ("polkit has not decided within 120 s", 120));
        let mut next = || said.try_recv().unwrap().header().member().unwrap().to_string();
        assert_eq!([next(), next()], ["CheckAuthorization", "CancelCheckAuthorization"]);
    }
}
