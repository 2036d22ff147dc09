//! What the kernel enforces, and on which devices.

use std::{fmt, num::NonZeroU32, ops::RangeInclusive};

use serde_json::{Value as Json, json};
use toml::de::DeValue;

use crate::{
    error::Problem,
    section::{Section, Value},
    text::quoted,
};

/// How many devices the tables of the kernel's programs have room for (`paced_devices` in `egress.bpf.c`).
pub const MAX_DEVICES: usize = 256;

/// The kernel's programs and queueing disciplines. The daemon loads nothing if no device is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The network devices through which clients and targets are reached, at most [`MAX_DEVICES`]; no name occurs twice.
    pub devices: Vec<KernelDevice>,
    /// Whether outgoing packets are marked, paced and counted by class (tc).
    pub egress: bool,
    /// Whether packets that no listener would serve are dropped on arrival (XDP).
    pub ingress: bool,
    /// Whether `fq` becomes the devices' root queueing discipline while paced runs.
    pub manage_qdisc: bool,
    /// The upper 16 bits of paced's packet marks; the lower ones are 0.
    pub mark_tag: u32,
    /// How many packets that begin a connection may pass per second from one /24 (IPv4) or /56 (IPv6); at least 1.
    pub initials_per_second_from_prefix: u32,
    /// How many may pass per second from all sources; at least 1. As many again pass in each of the lanes for clients
    /// that prove something.
    pub initials_per_second: u32,
    /// How many later fragments may pass per second to the addresses of listeners; at least 1.
    pub fragments_per_second: u32,
    /// How many packets may arrive at listeners per second before the kernel sheds packets of lower classes. `None`
    /// means no limit.
    pub arrivals_per_second: Option<NonZeroU32>,
}

impl Default for Kernel {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            egress: true,
            ingress: true,
            manage_qdisc: false,
            mark_tag: 0x70ac_0000,
            initials_per_second_from_prefix: 100,
            initials_per_second: 2_000,
            fragments_per_second: 1_000,
            arrivals_per_second: None,
        }
    }
}

/// The name of a network device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelDevice(String);

impl KernelDevice {
    /// Returns the name, as `ip link` shows it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KernelDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Value for KernelDevice {
    const EXPECTED: &'static str = "the name of a network device in quotes, such as \"eth0\"";

    /// Linux's own rules (`dev_valid_name` in `net/core/dev.c`), limited to ASCII.
    fn read(value: &DeValue<'_>) -> Option<Self> {
        let name = value.as_str()?;
        let is_valid = (1..=15).contains(&name.len())
            && ![".", ".."].contains(&name)
            && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:".contains(&byte));
        is_valid.then(|| Self(name.to_owned()))
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        json!({ "type": "string", "pattern": "^[!-.0-9;-~]{1,15}$", "not": { "enum": [".", ".."] } })
    }
}

/// Walks through the keys of the kernel's enforcement.
pub(crate) fn walk(section: &mut Section<'_>, of: &Kernel) -> Kernel {
    const PER_SECOND: RangeInclusive<u64> = 1..=1_000_000;
    const ARRIVALS: RangeInclusive<u64> = 1_000..=100_000_000;
    let (prefix, arrivals) = (of.initials_per_second_from_prefix, of.arrivals_per_second.map(NonZeroU32::get));
    let kernel = Kernel {
        devices: section.limited_list("devices", MAX_DEVICES, of.devices.clone()),
        egress: section.value("egress", of.egress),
        ingress: section.value("ingress", of.ingress),
        manage_qdisc: section.value("manage_qdisc", of.manage_qdisc),
        mark_tag: section.hexadecimal("mark_tag", 0..=u32::MAX.into(), of.mark_tag),
        initials_per_second_from_prefix: section.number("initials_per_second_from_prefix", PER_SECOND, prefix),
        initials_per_second: section.number("initials_per_second", PER_SECOND, of.initials_per_second),
        fragments_per_second: section.number("fragments_per_second", PER_SECOND, of.fragments_per_second),
        arrivals_per_second: section
            .optional_number("arrivals_per_second", ARRIVALS, arrivals)
            .and_then(NonZeroU32::new),
    };
    if kernel.mark_tag == 0 || kernel.mark_tag & 0xffff != 0 {
        let cause = "a tag uses only the upper 16 bits, because the lower 16 are direction and class";
        section.refuse("mark_tag", Problem::Contradiction { cause, remedy: "write a number such as 0x70ac0000" });
    }
    if kernel.devices.len() > MAX_DEVICES {
        let cause = "there are more than 256 devices";
        section.refuse("devices", Problem::Contradiction { cause, remedy: "remove some" });
    }
    section.refuse_shared("devices", &kernel.devices, KernelDevice::clone, "a device is named twice");
    kernel
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Config,
        tests::{assert_refused, valid},
    };

    fn kernel(text: &str) -> Kernel {
        valid(&format!("[kernel]\n{text}")).kernel
    }

    #[test]
    fn nothing_is_loaded_where_no_device_is_named() {
        assert_eq!(kernel(""), Kernel::default());
        assert!(Kernel::default().devices.is_empty());
    }

    #[test]
    fn each_part_can_be_switched() {
        let text = "devices = [\"eth0\", \"wg-1.5\"]\negress = false\ningress = false\nmanage_qdisc = true\nmark_tag = 0x10000";
        let devices = ["eth0", "wg-1.5"].map(|name| KernelDevice(name.into())).to_vec();
        let expected = Kernel {
            devices,
            egress: false,
            ingress: false,
            manage_qdisc: true,
            mark_tag: 0x1_0000,
            initials_per_second_from_prefix: 7,
            initials_per_second: 1_000_000,
            fragments_per_second: 8,
            arrivals_per_second: NonZeroU32::new(1_000),
        };
        let limits = "initials_per_second_from_prefix = 7\ninitials_per_second = 1000000\nfragments_per_second = 8\n\
                      arrivals_per_second = 1000";
        assert_eq!(kernel(&format!("{text}\n{limits}")), expected);
    }

    #[test]
    fn there_are_as_many_devices_as_the_kernels_tables_have_room_for() {
        let devices = |count: usize| {
            let names: Vec<_> = (0..count).map(|at| format!("\"eth{at}\"")).collect();
            format!("devices = [{}]", names.join(", "))
        };
        assert_eq!(kernel(&devices(MAX_DEVICES)).devices.len(), MAX_DEVICES);
        let text = format!("[kernel]\n{}", devices(MAX_DEVICES + 1));
        let refusals = Config::from_toml(&text).unwrap_err().to_string();
        assert_refused(&text, &refusals, ["line 2", "more than 256 devices", "kernel.devices"]);
        assert!(Config::schema().contains("\"maxItems\": 256"));
    }

    #[test]
    fn a_value_that_is_no_device_or_no_tag_is_refused() {
        for (line, why) in [
            ("devices = [\"\"]", ["line 2", "\"\"", "such as \"eth0\""]),
            ("devices = [\"a/b\"]", ["line 2", "a/b", "such as \"eth0\""]),
            ("devices = [\"sixteen-letters-\"]", ["line 2", "sixteen", "such as \"eth0\""]),
            ("devices = [\"a\", \"a\"]", ["line 2", "twice", ""]),
            ("egress = \"yes\"", ["line 2", "\"yes\"", "true or false"]),
            ("mark_tag = 0x70ac0001", ["line 2", "upper 16 bits", "0x70ac0000"]),
            ("initials_per_second = 0", ["line 2", "0", "1000000"]),
            ("fragments_per_second = 0", ["line 2", "0", "1000000"]),
            ("arrivals_per_second = 999", ["line 2", "999", "from 1000 to 100000000"]),
            ("mark_tag = 0", ["line 2", "upper 16 bits", "0x70ac0000"]),
        ] {
            let text = format!("[kernel]\n{line}");
            let refusals = Config::from_toml(&text).expect_err(&text).to_string();
            assert_refused(&text, &refusals, why);
        }
    }
}
