//! Queueing disciplines, set over netlink (rtnetlink(7)).

use std::{collections::BTreeMap, sync::OnceLock};

use anyhow::{Result, bail};
use bpf::{Availability, Finding};
use netlink::{
    Error, Socket,
    core::{DefaultNla, NLM_F_CREATE, NLM_F_REPLACE, Nla as _},
    message::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage, TcOption},
    },
    serves_queue,
};

/// The handle of every `fq` that paced sets, by which it knows its own: the kernel numbers those without a handle from
/// 8001: on.
const FQ_HANDLE: TcHandle = TcHandle { major: 0x70ac, minor: 0 };

/// Where a device has `fq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FqAt {
    /// At the root, set by this monitor or one before it.
    Own,
    /// At the root, left by a paced all of whose processes were killed.
    Left,
    /// At the root, set by another program.
    Others,
    /// Below the root, for every hardware queue, set by another program.
    Below,
    /// Not where packets of all queues pass it.
    Nowhere,
}

/// The root queueing discipline of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Root {
    kind: String,
    handle: TcHandle,
    /// Whether it has a child for each hardware queue, and every child is `fq`.
    has_fq_below: bool,
}

impl Root {
    /// Its name for people.
    pub(super) fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether it is an `fq` that paced set: this process, or an earlier one.
    fn is_fq_of_paced(&self) -> bool {
        self.kind == "fq" && self.handle == FQ_HANDLE
    }

    /// Returns where the device has `fq`; `is_noted` says whether the ledger has the device.
    pub(super) fn fq_at(&self, is_noted: bool) -> FqAt {
        match (self.is_fq_of_paced(), is_noted) {
            (true, true) => FqAt::Own,
            (true, false) => FqAt::Left,
            _ if self.kind == "fq" => FqAt::Others,
            _ if self.has_fq_below => FqAt::Below,
            _ => FqAt::Nowhere,
        }
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

/// Finds each device's root among all queueing disciplines, by the device's index.
fn roots_among(all: &[TcMessage]) -> BTreeMap<u32, Root> {
    let roots = all.iter().filter(|qdisc| qdisc.header.parent == TcHandle::ROOT).filter_map(|root| {
        let kind = kind_of(&root.attributes).unwrap_or("an unnamed qdisc");
        let is_child = |qdisc: &&TcMessage| {
            let is_of_device = qdisc.header.index == root.header.index;
            is_of_device && serves_queue(qdisc.header.parent, (kind, root.header.handle))
        };
        let mut children = all.iter().filter(is_child).peekable();
        let has_fq_below = children.peek().is_some() && children.all(|child| kind_of(&child.attributes) == Some("fq"));
        let root_found = Root { kind: kind.to_owned(), handle: root.header.handle, has_fq_below };
        Some((u32::try_from(root.header.index).ok()?, root_found))
    });
    roots.collect()
}

fn kind_of(attributes: &[TcAttribute]) -> Option<&str> {
    attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Kind(kind) => Some(kind.as_str()),
        _ => None,
    })
}

/// What the kernel says about `fq`, found once: it may take a search of megabytes, and a monitor asks each second. Once a module is loaded,
/// nobody asks.
static FOUND: OnceLock<Finding> = OnceLock::new();

/// Makes `fq` the root of a device, in place of the kernel's default `before`.
pub(super) fn set_fq(device: &str, index: u32, before: &Root) -> Result<()> {
    before.yields(device)?;
    with_netlink(async |netlink| {
        let mut message = TcMessage::with_index(i32::try_from(index)?);
        message.header.parent = TcHandle::ROOT;
        message.header.handle = FQ_HANDLE;
        message.attributes = vec![TcAttribute::Kind("fq".to_owned()), TcAttribute::Options(fq_options())];
        let wanted = RouteNetlinkMessage::NewQueueDiscipline(message);
        netlink
            .change(wanted, NLM_F_CREATE | NLM_F_REPLACE)
            .await
            .map_err(|error| refused(device, error, || FOUND.get_or_init(bpf::probe_fq).clone()))
    })
}

/// Explains why the kernel set no fq: if it lacks the discipline, it reports a missing file (ENOENT, `qdisc_create` in
/// net/sched/sch_api.c).
fn refused(device: &str, error: Error, probe_fq: impl FnOnce() -> Finding) -> anyhow::Error {
    let context = match &error {
        Error::Refused(refusal) if refusal.raw_os_error() == Some(libc::ENOENT) => match probe_fq() {
            Finding { state: Availability::No, why } => format!("{device}: this kernel has no fq: {why}"),
            _ => format!("{device}: this kernel has no fq; load its module with `modprobe sch_fq`"),
        },
        _ => format!("failed to set fq on {device}"),
    };
    anyhow::Error::new(error).context(context)
}

/// Returns each device's root, by the device's index.
pub(super) fn roots() -> Result<BTreeMap<u32, Root>> {
    with_netlink(async |netlink| {
        let all = list(&netlink, RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default())).await?;
        let all = all.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewQueueDiscipline(qdisc) => Some(qdisc),
            _ => None,
        });
        Ok(roots_among(&all.collect::<Vec<_>>()))
    })
}

/// The hooks of `clsact`, as parents of filters (`TC_H_MIN_INGRESS` and `TC_H_MIN_EGRESS`,
/// include/uapi/linux/pkt_sched.h).
const INGRESS_HOOK: u32 = 0xffff_fff2;
const EGRESS_HOOK: u32 = 0xffff_fff3;

/// The place of a filter among all filters for a device's outgoing packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FilterPlace {
    /// There is no such filter.
    Missing,
    /// No other program's filter comes before it.
    First,
    /// A filter of this preference (`pref`) comes before it, and may end the chain.
    After(u32),
}

/// Returns the place of the filter with the BPF program of this number among those for a device's outgoing packets.
pub(super) fn filter_place(index: u32, program: u32) -> Result<FilterPlace> {
    with_netlink(async |netlink| Ok(place_among(&filters(&netlink, index, EGRESS_HOOK).await?, program)))
}

/// Whether a device has a `clsact` that paced has made, be it this process or another: its filter there says so.
pub(super) fn has_clsact_of_paced(index: u32) -> Result<bool> {
    with_netlink(async |netlink| Ok(filters(&netlink, index, EGRESS_HOOK).await?.iter().any(is_in_own_clsact)))
}

fn is_in_own_clsact(filter: &TcMessage) -> bool {
    let handle = TcHandle::from(bpf::egress::FILTER_IN_OWN_CLSACT);
    filter.header.handle == handle && filter.attributes.iter().any(is_named_paced)
}

/// Finds the place of a program's filter; the kernel lists filters in the order in which they run.
fn place_among(filters: &[TcMessage], program: u32) -> FilterPlace {
    let runs_it = |filter: &TcMessage| filter.attributes.iter().any(|attribute| runs(attribute, program));
    let Some(at) = filters.iter().position(runs_it) else { return FilterPlace::Missing };
    let comes_first = |filter: &&TcMessage| {
        // The kernel lists each preference also without a filter. Other chains run only if a filter jumps to them.
        let is_filter = filter.attributes.iter().any(|attribute| matches!(attribute, TcAttribute::Options(_)));
        let is_elsewhere = filter.attributes.iter().any(|attribute| matches!(attribute, TcAttribute::Chain(1..)));
        // paced's program, of this process or another, lets the next filter run.
        let is_of_paced = filter.attributes.iter().any(is_named_paced);
        is_filter && !is_elsewhere && !is_of_paced
    };
    let first = filters.iter().take(at).find(comes_first);
    first.map_or(FilterPlace::First, |first| FilterPlace::After(first.header.info >> 16))
}

/// Returns the filters at a hook.
async fn filters(netlink: &Socket, index: u32, hook: u32) -> Result<Vec<TcMessage>> {
    let mut message = TcMessage::with_index(i32::try_from(index)?);
    message.header.parent = TcHandle::from(hook);
    let all = list(netlink, RouteNetlinkMessage::GetTrafficFilter(message)).await?;
    let filters = all.into_iter().filter_map(|message| match message {
        RouteNetlinkMessage::NewTrafficFilter(filter) => Some(filter),
        _ => None,
    });
    Ok(filters.collect())
}

/// `TCA_BPF_NAME` and `TCA_BPF_ID` (include/uapi/linux/pkt_cls.h).
const PROGRAM_NAME: u16 = 7;
const PROGRAM_ID: u16 = 11;

/// Returns whether a filter's attribute contains the number of a program.
fn runs(attribute: &TcAttribute, program: u32) -> bool {
    has_option(attribute, PROGRAM_ID, &program.to_ne_bytes())
}

/// Returns whether a filter's attribute contains the name of paced's program.
fn is_named_paced(attribute: &TcAttribute) -> bool {
    has_option(attribute, PROGRAM_NAME, &[bpf::egress::PROGRAM.as_bytes(), b"\0"].concat())
}

fn has_option(attribute: &TcAttribute, kind: u16, wanted: &[u8]) -> bool {
    let TcAttribute::Options(options) = attribute else { return false };
    options.iter().filter(|option| option.kind() == kind).any(|option| {
        let mut value = vec![0; option.value_len()];
        option.emit_value(&mut value);
        value == wanted
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

    impl Root {
        /// A root without children.
        pub(crate) fn of(kind: &str, handle: u32) -> Self {
            Self { kind: kind.to_owned(), handle: TcHandle::from(handle), has_fq_below: false }
        }

        /// A root whose hardware queues all have `fq`.
        pub(crate) fn of_queues(kind: &str) -> Self {
            Self { has_fq_below: true, ..Self::of(kind, 0) }
        }
    }

    #[test]
    fn a_kernel_without_fq_is_told_from_other_refusals() {
        let found = |state, why: &'static str| Finding { state, why: why.into() };
        let said_with = |code, fq: Finding| {
            format!("{:#}", refused("eth0", Error::Refused(io::Error::from_raw_os_error(code)), || fq))
        };
        let said = |code| said_with(code, found(Availability::Unknown, "/lib/modules is missing"));
        let missing = said(libc::ENOENT);
        assert!(
            missing.starts_with("eth0: this kernel has no fq; load its module with `modprobe sch_fq`"),
            "{missing}"
        );
        let without_modules = said_with(libc::ENOENT, found(Availability::No, "this kernel has no modules"));
        assert!(
            without_modules.starts_with("eth0: this kernel has no fq: this kernel has no modules"),
            "{without_modules}"
        );
        assert!(!without_modules.contains("modprobe"), "{without_modules}");
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
    fn a_clsact_is_known_as_made_by_paced_by_the_handle_of_paced_s_filter_in_it() {
        let filter = |name: &[u8], handle: u32| {
            let name = TcAttribute::Options(vec![TcOption::Other(DefaultNla::new(7, name.to_vec()))]);
            let mut filter = message(TcHandle::from(EGRESS_HOOK), 0, vec![name]);
            filter.header.handle = TcHandle::from(handle);
            filter
        };
        for (name, handle, is_own) in
            [(&b"paced_egress\0"[..], 0x70ac, true), (b"paced_egress\0", 1, false), (b"other\0", 0x70ac, false)]
        {
            assert_eq!(is_in_own_clsact(&filter(name, handle)), is_own, "{name:?} {handle}");
        }
    }

    #[test]
    fn an_fq_is_known_as_set_by_paced_by_its_handle_and_only_the_kernels_defaults_yield_to_it() {
        let root = Root::of;
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

    fn message(parent: TcHandle, handle: u16, attributes: Vec<TcAttribute>) -> TcMessage {
        let mut message = TcMessage::with_index(7);
        message.header.parent = parent;
        message.header.handle = TcHandle { major: handle, minor: 0 };
        message.attributes = attributes;
        message
    }

    #[test]
    fn several_queues_have_fq_where_each_of_them_has() {
        let qdisc = |kind: &str, handle, parent| message(parent, handle, vec![TcAttribute::Kind(kind.to_owned())]);
        let below = |kind, minor| qdisc(kind, 100 + minor, TcHandle { major: 1, minor });
        let root = |kind| qdisc(kind, 1, TcHandle::ROOT);
        let other_device = || {
            let mut other = below("pfifo_fast", 3);
            other.header.index = 8;
            other
        };
        for (has_fq_below, qdiscs) in [
            (true, vec![root("mq"), below("fq", 1), below("fq", 2), other_device()]),
            (true, vec![below("fq", 1), root("mqprio")]),
            (false, vec![root("mq"), below("fq", 1), below("pfifo_fast", 2)]),
            (false, vec![root("mq")]),
            (false, vec![root("htb"), below("fq", 1)]),
            (false, vec![root("mq"), qdisc("clsact", 0xffff, TcHandle::CLSACT)]),
        ] {
            let roots = roots_among(&qdiscs);
            assert_eq!(roots.keys().collect::<Vec<_>>(), [&7], "{qdiscs:?}");
            assert_eq!(roots[&7].fq_at(false) == FqAt::Below, has_fq_below, "{qdiscs:?}");
        }
    }

    #[test]
    fn a_filter_that_may_hide_packets_from_our_own_is_told_by_its_preference() {
        let option = |kind, value: &[u8]| TcOption::Other(DefaultNla::new(kind, value.to_vec()));
        let filter = |preference: u32, chain, options: Option<Vec<TcOption>>| {
            let options = options.map(TcAttribute::Options);
            let mut filter = message(TcHandle::from(EGRESS_HOOK), 0, vec![TcAttribute::Chain(chain)]);
            filter.header.info = preference << 16 | 3;
            filter.attributes.extend(options);
            filter
        };
        let of_paced = |program: u32| Some(vec![option(7, b"paced_egress\0"), option(11, &program.to_ne_bytes())]);
        let foreign = || Some(vec![option(7, b"other\0"), option(11, &9_u32.to_ne_bytes())]);
        let own = || filter(49_151, 0, of_paced(7));
        for (place, filters) in [
            (FilterPlace::Missing, vec![filter(1, 0, foreign()), filter(2, 0, of_paced(8))]),
            (FilterPlace::First, vec![filter(49_151, 0, None), own(), filter(49_152, 0, foreign())]),
            (FilterPlace::First, vec![filter(49_150, 0, of_paced(8)), own()]),
            (FilterPlace::First, vec![filter(1, 0, None), filter(1, 5, foreign()), own()]),
            (FilterPlace::After(1), vec![filter(1, 0, None), filter(1, 0, foreign()), filter(3, 0, foreign()), own()]),
        ] {
            assert_eq!(place_among(&filters, 7), place, "{filters:?}");
        }
    }
}
