//! What is known of the devices that packets leave by.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use s2n_quic_platform::message::default::Handle;

/// A device, as far as messages are concerned.
#[derive(Debug)]
pub struct Device {
    name: String,
    keeps_departures: AtomicBool,
    segments: AtomicBool,
}

impl Device {
    /// A device of which nothing is known: departures are written, and packets leave together.
    fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), keeps_departures: AtomicBool::new(true), segments: AtomicBool::new(true) }
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether its queueing discipline releases packets at their departures, as `fq` does.
    #[must_use]
    pub fn keeps_departures(&self) -> bool {
        self.keeps_departures.load(Relaxed)
    }

    /// Notes whether it does.
    pub fn set_keeps_departures(&self, keeps: bool) {
        self.keeps_departures.store(keeps, Relaxed);
    }

    /// Whether messages of several packets pass it.
    #[must_use]
    pub fn segments(&self) -> bool {
        self.segments.load(Relaxed)
    }

    /// Has packets leave one by one from now on; tells whether that is new.
    pub fn refuse_segmentation(&self) -> bool {
        self.segments.swap(false, Relaxed)
    }
}

/// The devices of this host, by what is reached through them. Clones share what is known.
#[derive(Clone, Debug)]
pub struct Devices {
    unknown: Arc<Device>,
}

impl Default for Devices {
    fn default() -> Self {
        Self { unknown: Arc::new(Device::new("unknown")) }
    }
}

impl Devices {
    /// The device that packets on `path` leave by.
    #[must_use]
    pub fn toward(&self, _path: &Handle) -> Arc<Device> {
        self.unknown()
    }

    /// What stands for a device that has not been found.
    #[must_use]
    pub fn unknown(&self) -> Arc<Device> {
        self.unknown.clone()
    }
}
