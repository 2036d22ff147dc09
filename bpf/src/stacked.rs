//! Devices that stand on others: a VLAN on its device, a bond or a bridge on its members.

use std::{collections::BTreeSet, fs, path::Path};

/// Returns the devices on which a device stands, directly or through others: every packet of the device also passes one of them. The set is
/// empty if sysfs does not show the device; its mount belongs to one network namespace.
#[must_use]
pub fn lower_devices(device: &str) -> BTreeSet<String> {
    lower_in(Path::new("/sys/class/net"), device)
}

fn lower_in(folder: &Path, device: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut unread = vec![device.to_owned()];
    while let Some(device) = unread.pop() {
        // The kernel links each lower neighbour as `lower_NAME` (`netdev_adjacent_sysfs_add`, net/core/dev.c).
        let links = fs::read_dir(folder.join(device)).into_iter().flatten().flatten();
        let names = links.filter_map(|link| Some(link.file_name().to_str()?.strip_prefix("lower_")?.to_owned()));
        unread.extend(names.filter(|name| found.insert(name.clone())));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_stands_on_all_devices_below_it() {
        let folder = std::env::temp_dir().join(format!("paced-stacked-{}", std::process::id()));
        for (device, links) in [
            ("bond0.5", &["lower_bond0", "statistics"][..]),
            ("bond0", &["lower_eth0", "lower_eth1", "upper_bond0.5"]),
            ("eth0", &["upper_bond0", "ifindex"]),
            ("eth1", &["upper_bond0"]),
            // No device stands on itself, but no answer of the kernel may keep this from ending.
            ("ring", &["lower_ring"]),
        ] {
            links.iter().for_each(|link| fs::create_dir_all(folder.join(device).join(link)).unwrap());
        }
        let of = |device| lower_in(&folder, device).into_iter().collect::<Vec<_>>();
        assert_eq!(of("bond0.5"), ["bond0", "eth0", "eth1"]);
        assert_eq!(of("bond0"), ["eth0", "eth1"]);
        assert_eq!((of("eth0").len(), of("none0").len(), of("ring").len()), (0, 0, 1));
        fs::remove_dir_all(folder).unwrap();
        assert!(lower_devices("lo").is_empty());
    }
}
