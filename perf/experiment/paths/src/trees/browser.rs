//! The priorities that browsers give to requests, by the kind of resource.
//!
//! | | Safari | Firefox | Chromium |
//! |---|--:|---|---|
//! | document | 255 | leaders, 22 | highest: weight 256, `u=0, i` |
//! | style | 24 | leaders, 22 | highest: 256, `u=0` |
//! | script in the head | 24 | leaders, 22 | medium: 220, `u=1` |
//! | script that does not block | 24 | others, 22 | lowest: 147, `u=3` |
//! | font | 16 | followers, 32 | highest: 256, `u=0` |
//! | image | 8 | followers, 12 | lowest: 147, `u=3, i` |
//!
//! Firefox: `Http2Session` makes the groups (leaders of weight 201, others of 101, followers of 1 below the leaders), the classes of
//! service of `ScriptLoader`, `FontLoaderUtils` and others choose among them, and weights are 21 less the priority of
//! `nsISupportsPriority`. Chromium: `ResourceFetcher` gives priorities, `Http2PriorityDependencies` makes a chain of them by exclusive
//! dependencies, each stream behind all that are as urgent; over HTTP/3 the urgency is `HIGHEST` less the priority, and
//! `ShouldLoadIncremental` says which answers may share. Safari 11: FStream's section III for documents and images; the values 24 and 16
//! between these follow common reports.

use plan::trees::{Browser, ResourceKind};
use sched::path::precedence::Precedence;

use super::super::signal::{Group, Signal};

/// Returns the priority that a browser sends with a request.
pub(super) fn signal(browser: Browser, kind: ResourceKind) -> Signal {
    let shared = |group, weight| Signal { urgency: 0, is_incremental: true, group, weight };
    match browser {
        Browser::Safari => shared(None, priority(browser, kind)),
        Browser::FirefoxH2 => shared(Some(group(kind)), priority(browser, kind)),
        Browser::ChromiumH2 => Signal { urgency: urgency(kind), is_incremental: false, group: None, weight: 1 },
        Browser::ChromiumH3 => {
            let is_incremental = matches!(kind, ResourceKind::Document | ResourceKind::Image);
            Signal { urgency: urgency(kind), is_incremental, group: None, weight: 1 }
        }
    }
}

/// Returns the weight of a request in HTTP/2, 1 to 255. FStream and SA-ECF use it.
pub(super) const fn priority(browser: Browser, kind: ResourceKind) -> u32 {
    match browser {
        Browser::Safari => match kind {
            ResourceKind::Document => 255,
            ResourceKind::Style | ResourceKind::Script | ResourceKind::AsyncScript => 24,
            ResourceKind::Font => 16,
            ResourceKind::Image => 8,
        },
        Browser::FirefoxH2 => match kind {
            ResourceKind::Document | ResourceKind::Style | ResourceKind::Script | ResourceKind::AsyncScript => 22,
            ResourceKind::Font => 32,
            ResourceKind::Image => 12,
        },
        Browser::ChromiumH2 | Browser::ChromiumH3 => match urgency(kind) {
            // 256, of which FStream allows 255.
            0 => 255,
            1 => 220,
            2 => 183,
            _ => 147,
        },
    }
}

/// Returns the weight of a request among requests of the same [`precedence`], for estimates. Firefox's images and fonts get their share
/// beside one leader.
pub(super) fn share(browser: Browser, kind: ResourceKind) -> u32 {
    match browser {
        Browser::Safari => priority(browser, kind),
        Browser::FirefoxH2 => match group(kind) {
            Group::Followers => Group::Leaders.weight() / 23,
            group => group.weight(),
        },
        Browser::ChromiumH2 | Browser::ChromiumH3 => 1,
    }
}

/// Returns the place of a request in the order of its connection, for estimates.
pub(super) fn precedence(browser: Browser, kind: ResourceKind) -> Precedence {
    let Signal { urgency, is_incremental, .. } = signal(browser, kind);
    Precedence { priority: u8::MAX - urgency, is_incremental, ..Precedence::SHARED }
}

const fn group(kind: ResourceKind) -> Group {
    match kind {
        ResourceKind::Document | ResourceKind::Style | ResourceKind::Script => Group::Leaders,
        ResourceKind::AsyncScript => Group::Others,
        ResourceKind::Font | ResourceKind::Image => Group::Followers,
    }
}

const fn urgency(kind: ResourceKind) -> u8 {
    match kind {
        ResourceKind::Document | ResourceKind::Style | ResourceKind::Font => 0,
        ResourceKind::Script => 1,
        ResourceKind::AsyncScript | ResourceKind::Image => 3,
    }
}
