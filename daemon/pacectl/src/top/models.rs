//! The page of engines and of requests for models.

use std::time::Duration;

use api::v1;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    widgets::Row,
};

use super::table::table;
use crate::{
    models::{engine_state, request},
    table::or_dash,
};

/// The content of the page.
#[derive(Default)]
pub(super) struct Models {
    pub(super) engines: Vec<v1::Engine>,
    /// The first page: more than fits on a screen.
    pub(super) requests: Vec<v1::ModelRequest>,
}

impl Models {
    /// Draws engines in at most the upper half, and requests below.
    pub(super) fn draw(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows = u16::try_from(self.engines.len()).unwrap_or(u16::MAX).saturating_add(2);
        let [upper, lower] =
            Layout::vertical([Constraint::Length(rows.min(area.height / 2)), Constraint::Min(3)]).areas(area);
        let (wide, fixed) = (Constraint::Fill(1), Constraint::Length);
        let heads = ["model", "engine", "state", "at work", "others", "waits", "step", "failed"];
        let engine = |of: &v1::Engine| {
            let step = of.cost.as_ref().and_then(|cost| cost.step).and_then(|step| Duration::try_from(step).ok());
            Row::new([
                of.model.clone(),
                or_dash(&of.engine),
                engine_state(of),
                format!("{}/{}", of.in_flight, of.max_in_flight),
                (of.others_running + of.others_waiting).to_string(),
                of.waiting.to_string(),
                step.map_or_else(|| "-".into(), |step| format!("{:.1} ms", step.as_secs_f64() * 1e3)),
                of.failed.to_string(),
            ])
        };
        let widths = vec![wide, wide, fixed(14), fixed(8), fixed(6), fixed(5), fixed(9), fixed(6)];
        let heads = heads.map(str::to_owned).to_vec();
        frame.render_widget(table(heads, self.engines.iter().map(engine), widths, "engines"), upper);

        let heads = ["request", "user", "class", "model", "state", "for", "budget", "tokens", "tokens/s"];
        let widths = vec![fixed(8), wide, fixed(11), wide, fixed(8), fixed(8), fixed(8), fixed(7), fixed(8)];
        let rows = self.requests.iter().take(usize::from(lower.height)).map(|of| Row::new(request(of)));
        let heads = heads.map(str::to_owned).to_vec();
        frame.render_widget(table(heads, rows, widths, "requests, the oldest first"), lower);
    }
}
