//! How long paced's own certificates stay valid, and when to warn about them.
//!
//! Certificates of authorities are not considered: peers verify with the authority's key and ignore its dates (as
//! rustls does).

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use config::{Config, relay::ListenerIdentity};
use quic::tls::read_certificates;
use relay::auth;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use webpki::{EndEntityCert, Error, KeyUsage};

const DAY: Duration = Duration::from_secs(86_400);

/// A certificate that paced presents to its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The section that uses it: "relay", "gateway", "control.tcp", "forward", "proxy", "serve" or "hop".
    pub used_by: &'static str,
    /// The address where that section listens; for a hop, the first local address whose traffic passes it.
    pub address: SocketAddr,
    /// The certificate's file.
    pub file: PathBuf,
    /// The time at which it expires.
    pub expires: SystemTime,
}

/// How near a certificate is to its expiry. Each step is reported once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// Less than 21 days.
    Weeks,
    /// Less than 7 days.
    Days,
    /// It has expired.
    Expired,
}

/// Returns when a certificate expires (RFC 5280 §4.1.2.5).
///
/// # Errors
/// It is not an X.509 certificate, or its dates cannot be read.
pub fn expires(certificate: &CertificateDer<'_>) -> Result<SystemTime> {
    auth::expires(certificate).context("it is no X.509 certificate, or its dates cannot be read")
}

/// Refuses a certificate of `file` that has expired at `now`, unless it is one of those `in_force`.
///
/// # Errors
/// It has expired, or is not a certificate.
pub fn refuse_expired(
    certificate: &CertificateDer<'_>,
    file: &Path,
    in_force: &[Certificate],
    now: SystemTime,
) -> Result<()> {
    let expires = expires(certificate)?;
    if in_force.iter().any(|known| known.file == file && known.expires == expires) {
        return Ok(());
    }
    let since = now.duration_since(expires).unwrap_or_default();
    ensure!(
        expires > now,
        "the certificate expired {} days ago, on {}: renew it",
        since.as_secs() / DAY.as_secs(),
        date(expires)
    );
    Ok(())
}

/// Formats a time for people (RFC 3339), in UTC.
#[must_use]
pub fn date(time: SystemTime) -> String {
    prost_types::Timestamp::from(time).to_string()
}

impl Certificate {
    /// Returns how many whole days are left at `now`; negative once it has expired.
    #[must_use]
    pub fn days_left(&self, now: SystemTime) -> i64 {
        let days = |span: Duration| i64::try_from(span.as_secs() / DAY.as_secs()).unwrap_or(i64::MAX);
        match self.expires.duration_since(now) {
            Ok(left) => days(left),
            Err(over) => -1 - days(over.duration()),
        }
    }

    /// Returns the warning about it at `now`, as a sentence.
    #[must_use]
    pub fn outlook(&self, now: SystemTime) -> String {
        let (file, date, left) = (self.file.display(), date(self.expires), self.days_left(now));
        match left {
            ..0 => format!("the certificate in {file} expired on {date}: renew it"),
            _ => format!("the certificate in {file} expires in {left} days, on {date}: renew it"),
        }
    }

    /// Returns how near its expiry is at `now`; `None` if it is more than 21 days away.
    #[must_use]
    pub fn nearness(&self, now: SystemTime) -> Option<Nearness> {
        match self.days_left(now) {
            ..0 => Some(Nearness::Expired),
            0..7 => Some(Nearness::Days),
            7..21 => Some(Nearness::Weeks),
            _ => None,
        }
    }
}

/// Reads the certificates that paced presents by its configuration, except for self-signed ones.
///
/// # Errors
/// A file cannot be read, or contains no certificate.
pub fn shown(config: &Config) -> Result<Vec<Certificate>> {
    let listeners = config.relay.iter().flat_map(|relay| &relay.listeners);
    let listeners = listeners.filter_map(|listener| match &listener.identity {
        ListenerIdentity::Files { certificate, .. } => Some(("relay", listener.address, certificate)),
        ListenerIdentity::SelfSigned => None,
    });
    let fronts = config.gateway.iter().flat_map(|gateway| &gateway.listeners);
    let fronts = fronts.filter_map(|listener| match &listener.identity {
        Some(ListenerIdentity::Files { certificate, .. }) => Some(("gateway", listener.address, certificate)),
        _ => None,
    });
    let control = config.control.tcp.iter().map(|tcp| ("control.tcp", tcp.address, &tcp.certificate));
    let uplinks = config.all_uplinks().into_iter();
    let uplinks = uplinks.filter_map(|(section, at, uplink)| Some((section, at, &uplink.client.as_ref()?.certificate)));
    let read = |(used_by, address, file): (_, _, &PathBuf)| {
        let chain = read_certificates(file)?;
        let first = chain.first().context("no certificate")?;
        let expires = expires(first).with_context(|| file.display().to_string())?;
        Ok(Certificate { used_by, address, file: file.clone(), expires })
    };
    listeners.chain(fronts).chain(control).chain(uplinks).map(read).collect()
}

/// Returns why clients will refuse certificates of the relay's listeners, each with its file. Either the certificate is not valid yet at
/// `now`, or it names no host of the relay's templates (RFC 6125). Files that cannot be read are left out.
#[must_use]
pub fn unfit(config: &Config, now: SystemTime) -> Vec<(PathBuf, String)> {
    let Some(relay) = &config.relay else { return Vec::new() };
    let hosts: Vec<_> = relay.templates.iter().map(|template| template.origin().host.to_string()).collect();
    let mut unfit = Vec::new();
    for listener in &relay.listeners {
        let ListenerIdentity::Files { certificate: file, .. } = &listener.identity else { continue };
        let Some(first) = read_certificates(file).ok().and_then(|chain| chain.into_iter().next()) else { continue };
        let why = why_unfit(&first, &hosts, now)
            .map(|why| format!("clients will refuse the certificate in {}: {why}", file.display()));
        let told = why.map(|why| (file.clone(), why)).filter(|told| !unfit.contains(told));
        unfit.extend(told);
    }
    unfit
}

/// Logs what [`unfit`] returns.
pub fn warn_of_unfit(config: &Config) {
    unfit(config, SystemTime::now()).into_iter().for_each(|(_, why)| tracing::warn!("{why}"));
}

fn why_unfit(certificate: &CertificateDer<'_>, hosts: &[String], now: SystemTime) -> Option<String> {
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    let at = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
    if let Err(Error::CertNotValidYet { not_before, .. }) =
        parsed.verify_for_usage(&[], &[], &[], at, KeyUsage::server_auth(), None, None)
    {
        let begins = SystemTime::UNIX_EPOCH + Duration::from_secs(not_before.as_secs());
        return Some(format!("it is not valid before {}; is the clock right?", date(begins)));
    }
    let is_for = |host: &String| {
        let name = ServerName::try_from(host.as_str());
        name.is_ok_and(|name| parsed.verify_is_valid_for_subject_name(&name).is_ok())
    };
    let is_for_none = !hosts.is_empty() && !hosts.iter().any(is_for);
    is_for_none.then(|| format!("it names no host of relay.templates ({})", hosts.join(", ")))
}

/// The warnings already given about certificates.
#[derive(Debug, Default)]
pub struct CertificateWarnings(HashMap<(PathBuf, SystemTime), Nearness>);

impl CertificateWarnings {
    /// Returns the warnings due at `now` that were not yet given, once per file; forgets certificates no longer in use.
    pub fn due<'a>(&mut self, certificates: &'a [Certificate], now: SystemTime) -> Vec<(&'a Certificate, Nearness)> {
        let key = |certificate: &Certificate| (certificate.file.clone(), certificate.expires);
        self.0.retain(|told, _| certificates.iter().any(|certificate| key(certificate) == *told));
        let mut due = Vec::new();
        for certificate in certificates {
            let Some(nearness) = certificate.nearness(now) else { continue };
            let told = self.0.insert(key(certificate), nearness);
            if told.is_none_or(|told| told < nearness) {
                due.push((certificate, nearness));
            }
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    fn day(days: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(days * 86_400)
    }

    fn certificate(file: &str, expires: SystemTime) -> Certificate {
        let address = "192.0.2.1:443".parse().unwrap();
        Certificate { used_by: "relay", address, file: file.into(), expires }
    }

    #[test]
    fn the_end_of_a_certificate_is_read_from_it_and_one_that_is_over_is_refused() {
        let mut params = CertificateParams::new(vec!["relay.example".into()]).unwrap();
        params.not_before = date_time_ymd(1970, 1, 2);
        params.not_after = date_time_ymd(1970, 4, 11);
        let made = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert_eq!(expires(made.der()).unwrap(), day(100));
        let refused = |now, in_force: &[Certificate]| refuse_expired(made.der(), Path::new("a"), in_force, now);
        assert!(refused(day(99), &[]).is_ok());
        let refusal = refused(day(103), &[]).unwrap_err().to_string();
        assert!(refusal.contains("3 days ago") && refusal.contains("1970-04-11"), "{refusal}");
        assert!(expires(&CertificateDer::from(vec![0; 8])).is_err());
        assert!(refused(day(103), &[certificate("a", day(100))]).is_ok(), "it was in force before");
        assert!(refused(day(103), &[certificate("b", day(100)), certificate("a", day(99))]).is_err(), "others were");
    }

    #[test]
    fn a_certificate_that_clients_refuse_is_told_with_the_reason() {
        let mut params = CertificateParams::new(vec!["relay.example".into(), "192.0.2.1".into()]).unwrap();
        params.not_before = date_time_ymd(1970, 1, 2);
        params.not_after = date_time_ymd(1970, 4, 11);
        let made = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let why = |hosts: &[&str], now| {
            why_unfit(made.der(), &hosts.iter().map(ToString::to_string).collect::<Vec<_>>(), now)
        };
        assert_eq!(why(&["relay.example"], day(50)), None);
        assert_eq!(why(&["192.0.2.1"], day(50)), None);
        assert_eq!(why(&["other.example", "relay.example"], day(50)), None, "another listener may be for the others");
        let early = why(&["relay.example"], day(0)).unwrap();
        assert!(early.contains("not valid before 1970-01-02"), "{early}");
        let wrong = why(&["other.example", "2001:db8::1"], day(50)).unwrap();
        assert!(wrong.contains("no host of relay.templates (other.example, 2001:db8::1)"), "{wrong}");
    }

    #[test]
    fn days_that_are_left_are_whole_ones_and_those_that_are_over_negative() {
        let certificate = certificate("a", day(100));
        let half = Duration::from_secs(43_200);
        for (now, left) in [(day(79), 21), (day(79) + half, 20), (day(100) - half, 0), (day(100) + half, -1)] {
            assert_eq!(certificate.days_left(now), left);
        }
    }

    #[test]
    fn each_nearness_is_told_once_for_each_file_and_anew_for_another_certificate() {
        let mut told = CertificateWarnings::default();
        let [a, b] = ["a", "b"].map(|file| certificate(file, day(100)));
        let both = [a.clone(), b, a.clone()];
        let mut due = |certificates: &[Certificate], now: SystemTime| -> Vec<Nearness> {
            told.due(certificates, now).into_iter().map(|(_, nearness)| nearness).collect()
        };
        assert_eq!(due(&both, day(78)), []);
        assert_eq!(due(&both, day(80)), [Nearness::Weeks; 2]);
        assert_eq!(due(&both, day(81)), []);
        assert_eq!(due(&both, day(94)), [Nearness::Days; 2]);
        assert_eq!(due(&both, day(101)), [Nearness::Expired; 2]);
        assert_eq!(due(&both, day(200)), []);
        let renewed = [certificate("a", day(200))];
        assert_eq!(due(&renewed, day(150)), []);
        assert_eq!(due(&renewed, day(198)), [Nearness::Days], "what was told is about the one before");
    }
}
