//! The order in which streams are sent, by the priorities that their requests carry.

use std::collections::BTreeMap;

use super::{signal::Group, stream::Sending};

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Group(Group),
    Stream(usize),
}

/// The order of one connection's streams. At each node of the tree, start-time fair queueing (Goyal, Vin, Cheng, 1996) shares the
/// connection among the children by weight. A stream that begins later does not catch up with the others.
#[derive(Clone, Debug, Default)]
pub(super) struct Signals {
    /// The start tag of each node's next turn, in packets per weight.
    starts: BTreeMap<Node, f64>,
    /// The virtual time of each group: the start tag of its last turn. `None` is the root.
    virtual_times: BTreeMap<Option<Group>, f64>,
}

impl Signals {
    /// Chooses the stream of the next packet. `ready` lists the streams with data, in the order of their requests.
    pub(super) fn next(&mut self, ready: &[usize], streams: &[Sending]) -> Option<usize> {
        let urgency = ready.iter().map(|at| streams[*at].signal.urgency).min()?;
        let urgent: Vec<_> = ready.iter().copied().filter(|at| streams[*at].signal.urgency == urgency).collect();
        if let Some(first) = urgent.iter().find(|at| !streams[**at].signal.is_incremental) {
            return Some(*first);
        }
        let mut parent = None;
        loop {
            match self.turn(parent, &urgent, streams)? {
                Node::Stream(stream) => return Some(stream),
                Node::Group(group) => parent = Some(group),
            }
        }
    }

    /// Chooses the child of a node that has the next turn, and charges it one packet.
    fn turn(&mut self, parent: Option<Group>, ready: &[usize], streams: &[Sending]) -> Option<Node> {
        let mut children: BTreeMap<Node, u32> = BTreeMap::new();
        for at in ready {
            let signal = streams[*at].signal;
            if signal.group == parent {
                children.insert(Node::Stream(*at), signal.weight);
            }
            let mut above = signal.group;
            while let Some(group) = above {
                above = group.parent();
                if above == parent {
                    children.insert(Node::Group(group), group.weight());
                }
            }
        }
        let now = self.virtual_times.get(&parent).copied().unwrap_or_default();
        let start = |node: &Node| self.starts.get(node).copied().unwrap_or_default().max(now);
        let (node, weight) = children.into_iter().min_by(|(a, _), (b, _)| start(a).total_cmp(&start(b)))?;
        let start = start(&node);
        self.virtual_times.insert(parent, start);
        self.starts.insert(node, start + 1.0 / f64::from(weight));
        Some(node)
    }
}
