//! Queueing disciplines, set over netlink (rtnetlink(7)).

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use netlink::{
    Error, Socket,
    core::{DefaultNla, NLM_F_CREATE, NLM_F_REPLACE, Nla as _},
    message::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage, TcOption},
    },
};

/// The handle of every `fq` that paced sets, by which it knows its own: the kernel numbers those without a handle from
/// 8001: on.
const FQ_HANDLE: TcHandle = TcHandle { major: 0x70ac, minor: 0 };

/// The root queueing discipline of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Root {
    kind: String,
    handle: TcHandle,
}

impl Root {
    /// Its name for people.
    pub(super) fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether it is `fq`, whatever program set it.
    pub(super) fn is_fq(&self) -> bool {
        self.kind == "fq"
    }

    /// Whether it is an `fq` that paced set: this process, or an earlier one.
    pub(super) fn is_fq_of_paced(&self) -> bool {
        self.is_fq() && self.handle == FQ_HANDLE
    }

    /// Refuses to let `fq` replace a discipline that an administrator has set, or `mq`, below which every queue has its
    /// own discipline.
    fn yields(&self, device: &str) -> Result<()> {
        match self.kind() {
            "mq" => bail!("{device} has several queues: set fq below mq yourself, or as net.core.default_qdisc"),
            // The kernel gives no handle to qdiscs that it sets by itself, and sets again once another is removed.
            kind if self.handle != TcHandle::UNSPEC => {
                bail!("{device} has {kind} at its root, which paced did not set")
            }
            _ => Ok(()),
        }
    }
}

impl From<TcMessage> for Root {
    fn from(message: TcMessage) -> Self {
        let named = message.attributes.into_iter().find_map(|attribute| match attribute {
            TcAttribute::Kind(kind) => Some(kind),
            _ => None,
        });
        Self { kind: named.unwrap_or_else(|| "an unnamed qdisc".to_owned()), handle: message.header.handle }
    }
}

/// Makes `fq` the root of a device, in place of the kernel's default `before`.
pub(super) fn set_fq(device: &str, index: u32, before: &Root) -> Result<()> {
    before.yields(device)?;
    with_netlink(async |netlink| {
        let mut message = TcMessage::with_index(i32::try_from(index)?);
        message.header.parent = TcHandle::ROOT;
        message.header.handle = FQ_HANDLE;
        message.attributes = vec![TcAttribute::Kind("fq".to_owned()), TcAttribute::Options(fq_options())];
        let wanted = RouteNetlinkMessage::NewQueueDiscipline(message);
        netlink.change(wanted, NLM_F_CREATE | NLM_F_REPLACE).await.map_err(|error| refused(device, error))
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

/// Returns each device's root, by the device's index.
pub(super) fn roots() -> Result<BTreeMap<u32, Root>> {
    with_netlink(async |netlink| {
        let all = list(&netlink, RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default())).await?;
        let roots = all.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewQueueDiscipline(qdisc) if qdisc.header.parent == TcHandle::ROOT => {
                Some((u32::try_from(qdisc.header.index).ok()?, qdisc.into()))
            }
            _ => None,
        });
        Ok(roots.collect())
    })
}

/// The hooks of `clsact`, as parents of filters (`TC_H_MIN_INGRESS` and `TC_H_MIN_EGRESS`,
/// include/uapi/linux/pkt_sched.h).
const INGRESS_HOOK: u32 = 0xffff_fff2;
const EGRESS_HOOK: u32 = 0xffff_fff3;

/// Returns whether a filter with the BPF program of this number processes a device's outgoing packets.
pub(super) fn has_filter(index: u32, program: u32) -> Result<bool> {
    with_netlink(async |netlink| {
        let filters = filters(&netlink, index, EGRESS_HOOK).await?;
        Ok(filters.iter().flatten().any(|attribute| runs(attribute, program)))
    })
}

/// Returns the attributes of each filter at a hook.
async fn filters(netlink: &Socket, index: u32, hook: u32) -> Result<Vec<Vec<TcAttribute>>> {
    let mut message = TcMessage::with_index(i32::try_from(index)?);
    message.header.parent = TcHandle::from(hook);
    let all = list(netlink, RouteNetlinkMessage::GetTrafficFilter(message)).await?;
    let filters = all.into_iter().filter_map(|message| match message {
        RouteNetlinkMessage::NewTrafficFilter(filter) => Some(filter.attributes),
        _ => None,
    });
    Ok(filters.collect())
}

/// `TCA_BPF_ID` (include/uapi/linux/pkt_cls.h).
const PROGRAM_ID: u16 = 11;

/// Returns whether a filter's attribute contains the number of a program.
fn runs(attribute: &TcAttribute, program: u32) -> bool {
    let TcAttribute::Options(options) = attribute else { return false };
    options.iter().filter(|option| option.kind() == PROGRAM_ID).any(|option| {
        let mut value = vec![0; option.value_len()];
        option.emit_value(&mut value);
        value == program.to_ne_bytes()
    })
}

/// Removes the `fq` that paced set at the root of a device, which the kernel replaces with its default. Does nothing if
/// the root is another one by now.
pub(super) fn remove_fq(index: u32) -> Result<()> {
    with_netlink(async |netlink| {
        let mut message = TcMessage::with_index(i32::try_from(index)?);
        message.header.parent = TcHandle::ROOT;
        message.header.handle = FQ_HANDLE;
        message.attributes = vec![TcAttribute::Kind("fq".to_owned())];
        match netlink.change(RouteNetlinkMessage::DelQueueDiscipline(message), 0).await {
            // Another handle or kind (EINVAL), or the kernel's default (ENOENT): `tc_get_qdisc` in net/sched/sch_api.c.
            Err(Error::Refused(error)) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(()),
            outcome => Ok(outcome?),
        }
    })
}

/// Removes the `clsact` qdisc of a device, unless it still holds filters, which other programs have added; returns
/// whether it is gone.
pub(super) fn remove_clsact(index: u32) -> Result<bool> {
    with_netlink(async |netlink| {
        for hook in [INGRESS_HOOK, EGRESS_HOOK] {
            if !filters(&netlink, index, hook).await?.is_empty() {
                return Ok(false);
            }
        }
        let mut message = TcMessage::with_index(i32::try_from(index)?);
        message.header.parent = TcHandle::CLSACT;
        message.header.handle = TcHandle::from(0xffff_0000);
        netlink.change(RouteNetlinkMessage::DelQueueDiscipline(message), 0).await?;
        Ok(true)
    })
}

/// The parameters of `fq` (`include/uapi/linux/pkt_sched.h`) that bear on paced's packets, so that they do not depend on the
/// kernel's defaults. The horizon is twice the longest delay that the tc program sets.
fn fq_options() -> Vec<TcOption> {
    const HORIZON_US: u32 = (2 * bpf::egress::HORIZON_NS / 1_000) as u32;
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

async fn list(netlink: &Socket, asked: RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>, Error> {
    let mut all = Vec::new();
    netlink.list(asked, |message| all.push(message)).await?;
    Ok(all)
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

    #[test]
    fn a_filter_of_another_process_is_not_taken_for_our_own() {
        let option = |kind, value: &[u8]| TcOption::Other(DefaultNla::new(kind, value.to_vec()));
        // The name, the tag, and the number of the program.
        let of = |program: u32| {
            let id = option(11, &program.to_ne_bytes());
            TcAttribute::Options(vec![option(7, b"paced_egress\0"), option(10, &7_u64.to_ne_bytes()), id])
        };
        assert!(runs(&of(7), 7) && !runs(&of(8), 7) && !runs(&TcAttribute::Kind("bpf".to_owned()), 7));
        assert!(!runs(&TcAttribute::Options(vec![option(8, &7_u32.to_ne_bytes())]), 7), "flags are no number");
    }

    #[test]
    fn an_fq_is_known_as_set_by_paced_by_its_handle_and_only_the_kernels_defaults_yield_to_it() {
        let root = |kind: &str, handle: u32| Root { kind: kind.to_owned(), handle: TcHandle::from(handle) };
        for (root, is_of_paced, yields) in [
            (root("fq", 0x70ac_0000), true, false),
            (root("fq", 0x8001_0000), false, false),
            (root("pfifo", 0x70ac_0000), false, false),
            (root("pfifo", 0x0007_0000), false, false),
            (root("noqueue", 0), false, true),
            (root("pfifo_fast", 0), false, true),
            (root("mq", 0), false, false),
        ] {
            assert_eq!((root.is_fq_of_paced(), root.yields("eth0").is_ok()), (is_of_paced, yields), "{root:?}");
        }
    }
}
