//! Planned devices whose packets would be counted and charged twice, because they stand on other planned devices.

use std::collections::BTreeSet;

/// Returns why a planned device gets no programs although it is there: it stands on another planned device, whose programs
/// count and charge the same packets. `None` if it does not.
pub fn doubled<'a>(device: &str, planned: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let others: Vec<_> = planned.into_iter().filter(|other| *other != device).collect();
    if others.is_empty() { None } else { doubled_by(device, &others, &bpf::lower_devices(device)) }
}

fn doubled_by(device: &str, others: &[&str], lower: &BTreeSet<String>) -> Option<String> {
    let below = others.iter().find(|other| lower.contains(**other))?;
    Some(format!(
        "{device} is on top of {below}, which `devices` names too: each packet would be counted and charged twice. \
         Remove {device} from `devices`; if it has other lower devices, name them"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_lower_of_two_stacked_devices_gets_programs() {
        let lower = ["bond0", "eth0", "eth1"].map(str::to_owned).into();
        let why = doubled_by("bond0.5", &["eth7", "eth1"], &lower).unwrap();
        assert!(why.contains("bond0.5 is on top of eth1") && why.contains("Remove bond0.5"), "{why}");
        assert_eq!(doubled_by("bond0.5", &["eth7"], &lower), None);
        assert_eq!(doubled("lo", ["lo", "eth0"]), None);
    }
}
