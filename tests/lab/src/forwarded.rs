//! Two links from a client to a relay, each through a namespace that only forwards, so that `netem` can emulate them.
//!
//! netem treats a GSO message of its own host as one packet. A host that forwards gets and sends the packets one by one.

use anyhow::Result;

use crate::{
    netem::Netem,
    netns::{Chain, End, Link, Namespace},
    site::{Site, Terms},
};

/// A site whose client reaches the relay by its devices "first" and "second".
pub struct ForwardedLinks {
    /// The client, the relay and the target. There is nothing between relay and target.
    pub site: Site,
    /// By link: where packets toward the client and toward the relay leave the namespace in between.
    ends: [[End; 2]; 2],
    _between: [Namespace; 2],
}

impl ForwardedLinks {
    /// Makes the links, and starts a relay with these terms.
    ///
    /// # Errors
    /// Without root, or when the relay does not come up.
    pub fn new(terms: Terms<'_>) -> Result<Self> {
        let [client, relay, target] = ["client", "relay", "target"].map(Namespace::new);
        let (client, relay, target) = (client?, relay?, target?);
        let (first, second) = (Namespace::new("first")?, Namespace::new("second")?);
        let (near, far) = (Link::new(&client, &first, 1)?, Link::new(&first, &relay, 2)?);
        let (second_near, second_far) = (Link::new(&client, &second, 3)?, Link::new(&second, &relay, 4)?);
        let egress = Link::new(&relay, &target, 5)?;
        for namespace in [&client, &relay, &first, &second] {
            namespace.sysctl("net.ipv4.ip_forward", "1")?;
            for device in ["all", "default"] {
                namespace.sysctl(&format!("net.ipv4.conf.{device}.rp_filter"), "0")?;
            }
        }
        for (host, device) in [(&client, "first"), (&client, "second"), (&relay, "first"), (&relay, "second")] {
            host.sysctl(&format!("net.ipv4.conf.{device}.rp_filter"), "0")?;
        }
        // Only sockets bound to the second device use the second route.
        client.ip(&format!(
            "route add {0} via {1} dev first metric 10\nroute add {0} via {2} dev second metric 100",
            far.far.v4, near.far.v4, second_near.far.v4
        ))?;
        second.ip(&format!("route add {} via {}", far.far.v4, second_far.far.v4))?;
        relay.ip(&format!(
            "route add {} via {}\nroute add {} via {}\nroute add default via {}",
            near.near.v4, far.near.v4, second_near.near.v4, second_far.near.v4, egress.far.v4
        ))?;
        let ends = [&near.near, &near.far, &far.near, &far.far, &second_near.near, &second_near.far, &second_far.near];
        ends.into_iter().chain([&second_far.far]).try_for_each(End::keep_neighbours)?;
        [&near.near, &far.far, &second_near.near, &second_far.far].into_iter().try_for_each(End::segment)?;
        let access = Link { near: near.near, far: far.far };
        let site = Site::on(Chain { client, relay, target, access, egress }, terms)?;
        let ends = [[near.far, far.near], [second_near.far, second_far.near]];
        Ok(Self { site, ends, _between: [first, second] })
    }

    /// Emulates both links, the same in both directions except for the seeds of their losses. Losses begin again.
    ///
    /// # Errors
    /// On a kernel without netem, or before Linux 6.6 if packets are to be lost.
    pub fn emulate(&self, links: [Netem; 2]) -> Result<()> {
        for (place, (ends, link)) in self.ends.iter().zip(links).enumerate() {
            for (direction, end) in ends.iter().enumerate() {
                // Distinct for each direction of each link and seed.
                let seed = 4 * link.seed + (2 * place + direction) as u64;
                end.emulate(&Netem { seed, ..link })?;
            }
        }
        Ok(())
    }
}
