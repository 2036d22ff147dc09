//! The QUIC stacks of the peers: the versions in this repository's lock files, which a built peer has to name when it starts.

/// Returns the stack of `perf/peers/quinn-relay`, or `None` if the lock file lacks it.
#[must_use]
pub fn quinn() -> Option<String> {
    let lock = include_str!("../../peers/quinn-relay/Cargo.lock");
    Some(format!("quinn {}, h3 {}", locked(lock, "quinn")?, locked(lock, "h3")?))
}

/// Returns the stack of `perf/peers/quic-go-relay`, or `None` if `go.mod` lacks it.
#[must_use]
pub fn quic_go() -> Option<String> {
    let go_mod = include_str!("../../peers/go.mod");
    let mut words = go_mod.split_whitespace().skip_while(|word| *word != "github.com/quic-go/quic-go");
    words.nth(1).map(|version| format!("quic-go {version}"))
}

/// Returns the version of a package in a lock file of cargo.
fn locked<'a>(lock: &'a str, name: &str) -> Option<&'a str> {
    let line = format!("name = \"{name}\"");
    let mut lines = lock.lines().skip_while(|other| *other != line);
    lines.nth(1)?.strip_prefix("version = \"")?.strip_suffix('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_the_lock_files_of_the_peers() {
        let lock = "[[package]]\nname = \"quinn-udp\"\nversion = \"9.9.9\"\n\n[[package]]\nname = \"quinn\"\nversion = \"1.2.3\"\n";
        assert_eq!((locked(lock, "quinn"), locked(lock, "h3")), (Some("1.2.3"), None));
        let (quinn, quic_go) = (quinn().unwrap(), quic_go().unwrap());
        assert!(quinn.starts_with("quinn 0.") && quinn.contains(", h3 0."), "{quinn}");
        assert!(quic_go.starts_with("quic-go v"), "{quic_go}");
    }
}
