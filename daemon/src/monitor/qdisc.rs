//! Queueing disciplines, set over netlink (rtnetlink(7)).

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};
use netlink::{
    Error, Socket,
    core::{DefaultNla, NLM_F_CREATE, NLM_F_REPLACE, Nla as _},
    message::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkMessage},
        tc::{TcAttribute, TcHandle, TcMessage, TcOption},
    },
};

/// Makes `fq` the root of a device and returns the kind of the former root; `None` if that was `fq` already, whose
/// parameters are left. Does not replace an administrator's discipline, nor `mq`, below which every queue has its own
/// discipline.
pub(super) fn set_fq(device: &str) -> Result<Option<String>> {
    with_netlink(async |netlink| {
        let index = index(&netlink, device).await?;
        let before = root(&netlink, index).await?.with_context(|| format!("{device} has no qdisc"))?;
        let kind = kind(&before).to_owned();
        match kind.as_str() {
            "fq" => return Ok(None),
            "mq" => bail!("{device} has several queues: set fq below mq yourself, or as net.core.default_qdisc"),
            // The kernel gives no handle to qdiscs that it sets by itself, and sets again once another is removed.
            _ if before.header.handle != TcHandle::UNSPEC => {
                bail!("{device} has {kind} at its root, which paced did not set")
            }
            _ => {}
        }
        let mut message = TcMessage::with_index(index);
        message.header.parent = TcHandle::ROOT;
        message.attributes = vec![TcAttribute::Kind("fq".to_owned()), TcAttribute::Options(fq_options())];
        let wanted = RouteNetlinkMessage::NewQueueDiscipline(message);
        netlink.change(wanted, NLM_F_CREATE | NLM_F_REPLACE).await.map_err(|error| refused(device, error))?;
        Ok(Some(kind))
    })
}

/// Explains why the kernel set no fq: if it lacks the discipline, it reports a missing file (ENOENT, `qdisc_create` in
/// net/sched/sch_api.c).
fn refused(device: &str, error: Error) -> anyhow::Error {
    let context = match &error {
        Error::Refused(refusal) if refusal.raw_os_error() == Some(libc::ENOENT) => {
            format!("{device}: this kernel has no fq; load its module with `modprobe sch_fq`")
        }
        _ => format!("failed to set fq on {device}"),
    };
    anyhow::Error::new(error).context(context)
}

/// Returns the kind of each device's root, by the device's index.
pub(super) fn roots() -> Result<BTreeMap<u32, String>> {
    with_netlink(async |netlink| {
        let all = list(&netlink, RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default())).await?;
        let roots = all.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewQueueDiscipline(qdisc) if qdisc.header.parent == TcHandle::ROOT => {
                Some((u32::try_from(qdisc.header.index).ok()?, kind(&qdisc).to_owned()))
            }
            _ => None,
        });
        Ok(roots.collect())
    })
}

/// Returns whether a filter with a BPF program of this name processes a device's outgoing packets.
pub(super) fn has_filter(index: u32, program: &str) -> Result<bool> {
    with_netlink(async |netlink| {
        let mut message = TcMessage::with_index(i32::try_from(index)?);
        message.header.parent = TcHandle::from(0xffff_fff3); // TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)
        let all = list(&netlink, RouteNetlinkMessage::GetTrafficFilter(message)).await?;
        let is_ours = |message: &RouteNetlinkMessage| match message {
            RouteNetlinkMessage::NewTrafficFilter(filter) => {
                filter.attributes.iter().any(|attribute| names(attribute, program))
            }
            _ => false,
        };
        Ok(all.iter().any(is_ours))
    })
}

/// Returns whether a filter's attribute is an option that contains a name: `TCA_BPF_NAME`, which ends with NUL.
fn names(attribute: &TcAttribute, program: &str) -> bool {
    let TcAttribute::Options(options) = attribute else { return false };
    options.iter().any(|option| {
        let mut value = vec![0; option.value_len()];
        option.emit_value(&mut value);
        value.strip_suffix(b"\0") == Some(program.as_bytes())
    })
}

/// Removes the root of a device, which the kernel replaces with its default.
pub(super) fn remove_root(device: &str) -> Result<()> {
    with_netlink(async |netlink| {
        let mut message = TcMessage::with_index(index(&netlink, device).await?);
        message.header.parent = TcHandle::ROOT;
        Ok(netlink.change(RouteNetlinkMessage::DelQueueDiscipline(message), 0).await?)
    })
}

/// Removes the `clsact` qdisc of a device.
pub(super) fn remove_clsact(device: &str) -> Result<()> {
    with_netlink(async |netlink| {
        let mut message = TcMessage::with_index(index(&netlink, device).await?);
        message.header.parent = TcHandle::CLSACT;
        message.header.handle = TcHandle::from(0xffff_0000);
        Ok(netlink.change(RouteNetlinkMessage::DelQueueDiscipline(message), 0).await?)
    })
}

/// Every parameter of `fq` (`include/uapi/linux/pkt_sched.h`): omitted parameters would keep the values of an earlier
/// `fq`. The horizon is twice the longest delay that the tc program sets.
fn fq_options() -> Vec<TcOption> {
    const HORIZON_US: u32 = 2_000_000;
    let words: [(u16, u32); 11] = [
        (1, 10_000),    // packets in all
        (2, 1_000),     // packets of a flow
        (3, 3_028),     // bytes of a flow's turn
        (4, 15_140),    // the same of its first
        (5, 1),         // departure times are kept
        (7, u32::MAX),  // no limit to a flow's rate
        (8, 10),        // flows are found in 2^10 buckets
        (9, 40_000),    // microseconds before an idle flow gets a new turn
        (11, 68_750),   // bytes per second below which flows do not wait
        (12, u32::MAX), // no marking by sojourn
        (14, HORIZON_US),
    ];
    let words = words.into_iter().map(|(kind, value)| (kind, value.to_ne_bytes().to_vec()));
    words
        .chain([(15, vec![1])]) // packets beyond the horizon are dropped
        .map(|(kind, value)| TcOption::Other(DefaultNla::new(kind, value)))
        .collect()
}

fn with_netlink<T>(work: impl AsyncFnOnce(Socket) -> Result<T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async { work(Socket::open(&[])?).await })
}

async fn index(netlink: &Socket, device: &str) -> Result<i32> {
    let mut link = LinkMessage::default();
    link.attributes.push(LinkAttribute::IfName(device.to_owned()));
    let answer = netlink.ask(RouteNetlinkMessage::GetLink(link)).await;
    match answer.with_context(|| format!("there is no device {device}"))? {
        Some(RouteNetlinkMessage::NewLink(link)) => Ok(i32::try_from(link.header.index)?),
        _ => bail!("there is no device {device}"),
    }
}

async fn root(netlink: &Socket, index: i32) -> Result<Option<TcMessage>> {
    let all = list(netlink, RouteNetlinkMessage::GetQueueDiscipline(TcMessage::with_index(index))).await?;
    Ok(all.into_iter().find_map(|message| match message {
        RouteNetlinkMessage::NewQueueDiscipline(qdisc)
            if qdisc.header.index == index && qdisc.header.parent == TcHandle::ROOT =>
        {
            Some(qdisc)
        }
        _ => None,
    }))
}

async fn list(netlink: &Socket, asked: RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>, Error> {
    let mut all = Vec::new();
    netlink.list(asked, |message| all.push(message)).await?;
    Ok(all)
}

fn kind(message: &TcMessage) -> &str {
    let named = message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Kind(kind) => Some(kind.as_str()),
        _ => None,
    });
    named.unwrap_or("an unnamed qdisc")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_kernel_without_fq_is_told_from_other_refusals() {
        let said = |code| format!("{:#}", refused("eth0", Error::Refused(io::Error::from_raw_os_error(code))));
        let missing = said(libc::ENOENT);
        assert!(
            missing.starts_with("eth0: this kernel has no fq; load its module with `modprobe sch_fq`"),
            "{missing}"
        );
        let denied = said(libc::EPERM);
        assert!(denied.starts_with("failed to set fq on eth0: ") && !denied.contains("sch_fq"), "{denied}");
    }
}
