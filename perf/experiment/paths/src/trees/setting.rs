//! The setting in which a page loads: a cell, and the signals of a browser.

use plan::{
    paths::Cell,
    trees::{Browser, Page, TreesPlan},
};

/// A page in a cell, with one browser's signals.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    pub(super) plan: &'a TreesPlan,
    pub(super) page: &'a Page,
    pub(super) browser: Browser,
    pub(super) cell: &'a Cell,
}
