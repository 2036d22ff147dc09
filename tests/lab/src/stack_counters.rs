//! The counters of a namespace's network stack (`proc_pid_net(5)`).

use std::{collections::BTreeMap, fs};

use anyhow::Result;

use crate::netns::Namespace;

/// Values by `PART:NAME`, such as `Tcp:RetransSegs`.
pub type StackCounters = BTreeMap<String, u64>;

/// Reads the counters of a namespace.
///
/// # Errors
/// When the kernel does not report them.
pub fn read(namespace: &Namespace) -> Result<StackCounters> {
    let read = |name: &str| fs::read_to_string(format!("/proc/thread-self/net/{name}"));
    let text = namespace.run(|| Ok::<_, std::io::Error>(read("snmp")? + &read("netstat")?))??;
    Ok(parse(&text))
}

/// Parses snmp or netstat: each part has a line of names and a line of values. Negative values are omitted.
fn parse(text: &str) -> StackCounters {
    let lines: Vec<_> = text.lines().collect();
    let pairs = lines.chunks_exact(2).flat_map(|pair| {
        let part = pair[0].split(' ').next().unwrap_or_default();
        let both = pair[0].split(' ').zip(pair[1].split(' ')).skip(1);
        both.filter_map(move |(name, value)| Some((format!("{part}{name}"), value.parse().ok()?)))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_named_after_their_part() {
        let read = parse("Tcp: MaxConn RetransSegs\nTcp: -1 3\nMPTcpExt: MPJoinAckRx\nMPTcpExt: 1\n");
        let expected = [("MPTcpExt:MPJoinAckRx", 1), ("Tcp:RetransSegs", 3)];
        assert_eq!(read, expected.map(|(name, value)| (name.to_owned(), value)).into());
    }
}
