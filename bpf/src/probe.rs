//! Probes what the kernel and the rights of this process allow, by attempts that leave no trace.

use std::{borrow::Cow, fmt, fs, io, path::Path};

use memchr::memmem;

use crate::syscall::{ProgramType, UdpOption, load_trivial_program, try_option};

/// Whether a feature can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// It works, or exists.
    Yes,
    /// It does not work, or does not exist.
    No,
    /// This cannot be found out without changing something on this machine.
    Unknown,
}

impl fmt::Display for Availability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Availability::Yes => "yes",
            Availability::No => "no",
            Availability::Unknown => "unknown",
        })
    }
}

/// The result for one feature: whether it can be used, and why not or what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Whether it can be used.
    pub state: Availability,
    /// A text for people: what the feature is for, or, if it is unavailable, what would make it available.
    pub why: Cow<'static, str>,
}

/// The results of [`probe`]. Displayed as an aligned table, one line per feature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The kernel's release, as `uname -r` prints it; empty when `/proc` cannot be read.
    pub kernel: String,
    /// Effective CAP_BPF of the calling thread.
    pub cap_bpf: Finding,
    /// Effective CAP_PERFMON of the calling thread.
    pub cap_perfmon: Finding,
    /// Effective CAP_NET_ADMIN of the calling thread.
    pub cap_net_admin: Finding,
    /// Effective CAP_NET_RAW of the calling thread.
    pub cap_net_raw: Finding,
    /// A tc program loads.
    pub bpf: Finding,
    /// The kernel describes its types, which a program needs to run on another kernel than the one it was built for.
    pub btf: Finding,
    /// An XDP program loads; whether it attaches is not tried.
    pub xdp: Finding,
    /// `SO_TXTIME` with CLOCK_MONOTONIC is accepted on a UDP socket.
    pub txtime: Finding,
    /// `UDP_SEGMENT` is accepted.
    pub gso: Finding,
    /// `UDP_GRO` is accepted.
    pub gro: Finding,
    /// `SO_MARK` is allowed.
    pub mark: Finding,
    /// The kernel has the `fq` queueing discipline, which releases packets at their departure times.
    pub fq: Finding,
}

/// Probes which features can be used here.
///
/// Opens sockets that send nothing and loads programs without attaching them; takes a few milliseconds. The results do
/// not depend on configuration, such as which device has `fq`.
pub fn probe() -> Capabilities {
    let kernel = release();
    let effective = effective_capabilities(&read("/proc/thread-self/status"));
    let right = |bit: u32, serves, without| match effective {
        Some(set) if set >> bit & 1 == 1 => yes(serves),
        Some(_) => no(without),
        None => unknown("cannot read /proc"),
    };
    let option = |option, serves: &'static str, without: &'static str| match try_option(option) {
        Ok(()) => yes(serves),
        Err(error) => no(format!("{without} ({error})")),
    };
    Capabilities {
        cap_bpf: right(CAP_BPF, "may load programs", "no tc or XDP programs"),
        cap_perfmon: right(
            CAP_PERFMON,
            "may load programs that compute with packet pointers",
            "no XDP programs of paced",
        ),
        cap_net_admin: right(
            CAP_NET_ADMIN,
            "may attach programs and set qdiscs",
            "cannot attach programs or set qdiscs",
        ),
        cap_net_raw: right(CAP_NET_RAW, "may mark packets", "needed only for SO_MARK"),
        bpf: loads(ProgramType::SchedCls, "tc programs load"),
        btf: match Path::new(BTF).exists() {
            true => yes(BTF),
            false => no("the kernel was built without CONFIG_DEBUG_INFO_BTF, or /sys is not mounted"),
        },
        xdp: match loads(ProgramType::Xdp, "") {
            Finding { state: Availability::Yes, .. } => unknown(
                "programs load; attaching was not tried: generic mode works on any device, native mode needs support by its driver",
            ),
            other => other,
        },
        txtime: option(
            UdpOption::DepartureTime,
            "packets can carry departure times",
            "packets leave when they are sent",
        ),
        gso: option(UdpOption::Segmentation, "batches can leave in one call", "one call per packet"),
        gro: option(UdpOption::Coalescing, "batches can arrive in one call", "one buffer per packet"),
        mark: option(UdpOption::Mark, "sockets can carry their class", "needs CAP_NET_ADMIN or CAP_NET_RAW"),
        fq: fq_of(&kernel),
        kernel,
    }
}

/// Finds out whether the kernel has `fq`, as [`probe`] does.
#[must_use]
pub fn probe_fq() -> Finding {
    fq_of(&release())
}

fn release() -> String {
    read("/proc/sys/kernel/osrelease").trim().to_owned()
}

fn fq_of(kernel: &str) -> Finding {
    FqEvidence {
        default_qdisc: &read("/proc/sys/net/core/default_qdisc"),
        loaded: fs::read_to_string("/proc/modules").ok().as_deref(),
        builtin: &read(format!("/lib/modules/{kernel}/modules.builtin")),
        loadable: fs::read_to_string(format!("/lib/modules/{kernel}/modules.dep")).ok().as_deref(),
        btf: || fs::read(BTF).ok(),
    }
    .judge()
}

impl Capabilities {
    /// Lists every feature by its usual name, in the order of the table.
    pub fn rows(&self) -> [(&'static str, &Finding); 12] {
        [
            ("CAP_BPF", &self.cap_bpf),
            ("CAP_PERFMON", &self.cap_perfmon),
            ("CAP_NET_ADMIN", &self.cap_net_admin),
            ("CAP_NET_RAW", &self.cap_net_raw),
            ("bpf()", &self.bpf),
            ("BTF", &self.btf),
            ("XDP", &self.xdp),
            ("SO_TXTIME", &self.txtime),
            ("UDP GSO", &self.gso),
            ("UDP GRO", &self.gro),
            ("SO_MARK", &self.mark),
            ("fq", &self.fq),
        ]
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<13} | {:<7} | why, or what to do", "feature", "state")?;
        write!(f, "\n{:<13} | {:<7} | release {}", "Linux", Availability::Yes, self.kernel)?;
        self.rows().iter().try_for_each(|(name, found)| write!(f, "\n{name:<13} | {:<7} | {}", found.state, found.why))
    }
}

/// The types of the running kernel.
const BTF: &str = "/sys/kernel/btf/vmlinux";

const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// Names the rights for programs and qdiscs that the calling thread lacks.
pub(crate) fn missing_rights() -> Vec<&'static str> {
    let effective = effective_capabilities(&read("/proc/thread-self/status")).unwrap_or_default();
    let rights = [("CAP_BPF", CAP_BPF), ("CAP_NET_ADMIN", CAP_NET_ADMIN), ("CAP_PERFMON", CAP_PERFMON)];
    rights.into_iter().filter(|(_, bit)| effective >> bit & 1 == 0).map(|(name, _)| name).collect()
}

/// Reads the effective set from a `status` file of proc(5).
fn effective_capabilities(status: &str) -> Option<u64> {
    status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
}

fn loads(program_type: ProgramType, serves: &'static str) -> Finding {
    match load_trivial_program(program_type) {
        Ok(()) => yes(serves),
        Err(error) => no(match error.raw_os_error() {
            Some(libc::EPERM) => Cow::from("not permitted: needs CAP_BPF and CAP_NET_ADMIN outside user namespaces"),
            Some(libc::ENOSYS) => "the kernel was built without CONFIG_BPF_SYSCALL".into(),
            _ => format!("the kernel refused a trivial program ({error})").into(),
        }),
    }
}

/// The kernel's own information about its queueing disciplines. Reading it adds no discipline to a device.
struct FqEvidence<'a> {
    default_qdisc: &'a str,
    /// `/proc/modules`, absent on a kernel without modules.
    loaded: Option<&'a str>,
    builtin: &'a str,
    /// `modules.dep`, absent in many containers whatever their host has.
    loadable: Option<&'a str>,
    /// Reads the kernel's types: megabytes, so only where nothing else tells.
    btf: fn() -> Option<Vec<u8>>,
}

impl FqEvidence<'_> {
    fn judge(&self) -> Finding {
        let usable =
            || yes("set it with `tc qdisc replace dev DEVICE root fq` where packets leave, unless it is set already");
        let is_loaded = self.loaded.is_some_and(|modules| modules.lines().any(|line| line.starts_with("sch_fq ")));
        if self.default_qdisc.trim() == "fq" || is_loaded || lists_fq(self.builtin) {
            return usable();
        }
        if self.loadable.is_some_and(lists_fq) {
            return yes("a module, which `tc qdisc replace dev DEVICE root fq` loads");
        }
        // BTF contains the private state of sch_fq only if the kernel has it built in.
        let described = (self.btf)().map(|btf| memmem::find(&btf, b"\0fq_sched_data\0").is_some());
        match (self.loadable, self.loaded, described) {
            (_, _, Some(true)) => usable(),
            (Some(_), ..) => no("neither built in nor among the modules, so the kernel keeps no departure times"),
            (None, None, Some(false)) => {
                no("not built in, and this kernel has no modules, so it keeps no departure times")
            }
            _ => unknown(
                "not known to be built in, and /lib/modules is missing: try `tc qdisc replace dev DEVICE root fq`",
            ),
        }
    }
}

fn lists_fq(modules: &str) -> bool {
    modules
        .lines()
        .filter_map(|line| line.split(':').next()?.rsplit('/').next())
        .any(|file| file.starts_with("sch_fq.ko"))
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_else(|_: io::Error| String::new())
}

fn yes(why: impl Into<Cow<'static, str>>) -> Finding {
    Finding { state: Availability::Yes, why: why.into() }
}

fn no(why: impl Into<Cow<'static, str>>) -> Finding {
    Finding { state: Availability::No, why: why.into() }
}

fn unknown(why: impl Into<Cow<'static, str>>) -> Finding {
    Finding { state: Availability::Unknown, why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: FqEvidence<'_> = FqEvidence {
        default_qdisc: "pfifo_fast\n",
        loaded: Some("veth 1 0\n"),
        builtin: "",
        loadable: None,
        btf: || None,
    };

    #[test]
    fn fq_is_there_when_any_witness_says_so() {
        let witnesses = [
            FqEvidence { default_qdisc: "fq\n", ..NOTHING },
            FqEvidence { loaded: Some("veth 1 0\nsch_fq 20480 1 - Live\n"), ..NOTHING },
            FqEvidence { builtin: "kernel/net/sched/sch_fq.ko\n", ..NOTHING },
            FqEvidence { loadable: Some("kernel/net/sched/sch_fq.ko.xz: kernel/a.ko\n"), ..NOTHING },
            FqEvidence { btf: || Some(b"\0htb_sched\0fq_sched_data\0".to_vec()), ..NOTHING },
        ];
        assert!(witnesses.iter().all(|evidence| evidence.judge().state == Availability::Yes));
    }

    #[test]
    fn fq_is_missing_only_when_every_place_it_could_be_in_was_seen() {
        let among_modules =
            FqEvidence { loadable: Some("kernel/net/sched/sch_fq_codel.ko.xz: x/sch_fq.ko\n"), ..NOTHING };
        assert_eq!(among_modules.judge().state, Availability::No);
        let without_modules = FqEvidence { loaded: None, btf: || Some(b"\0fq_codel_sched_data\0".to_vec()), ..NOTHING };
        assert_eq!(without_modules.judge().state, Availability::No);
        let in_a_container = FqEvidence { btf: || Some(b"\0".to_vec()), ..NOTHING };
        assert_eq!(in_a_container.judge().state, Availability::Unknown);
    }

    #[test]
    fn rights_are_read_from_the_effective_set() {
        let status = "CapPrm:\t000001ffffffffff\nCapEff:\t0000008000001000\nCapBnd:\t000001ffffffffff\n";
        assert_eq!(effective_capabilities(status), Some(1 << CAP_BPF | 1 << CAP_NET_ADMIN));
        assert_eq!(effective_capabilities("Name:\tpaced\n"), None);
    }

    #[test]
    fn the_probe_finds_no_feature_that_lacks_its_rights() {
        let found = probe();
        assert!(!found.kernel.is_empty());
        if found.cap_net_admin.state == Availability::No {
            assert_eq!((found.bpf.state, found.xdp.state), (Availability::No, Availability::No));
        }
        if found.cap_net_raw.state == Availability::No && found.cap_net_admin.state == Availability::No {
            assert_eq!(found.mark.state, Availability::No);
        }
        assert_eq!(found.cap_bpf, probe().cap_bpf, "looking changes nothing");
    }

    #[test]
    fn the_table_is_aligned_and_has_a_reason_on_every_line() {
        let table = probe().to_string();
        let columns: Vec<_> =
            table.lines().map(|line| line.match_indices(" | ").map(|(at, _)| at).collect::<Vec<_>>()).collect();
        assert_eq!(columns.len(), 14);
        assert!(table.contains("\nCAP_PERFMON"), "{table}");
        assert!(columns.iter().all(|at| at[..2] == columns[0][..2]), "{table}");
        assert!(table.lines().all(|line| !line.ends_with("| ")), "{table}");
    }
}
