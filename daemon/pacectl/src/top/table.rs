//! A table on the screen: bold heads below a titled line, and rows.

use ratatui::{
    layout::Constraint,
    style::{Modifier, Style},
    widgets::{Block, Borders, Cell, Row, Table},
};

/// Returns a table of `rows` under `heads`, each of one or two lines.
pub(super) fn table<'a>(
    heads: Vec<String>,
    rows: impl Iterator<Item = Row<'a>>,
    widths: Vec<Constraint>,
    title: &'a str,
) -> Table<'a> {
    let height = if heads.iter().any(|head| head.contains('\n')) { 2 } else { 1 };
    let bold = Style::new().add_modifier(Modifier::BOLD);
    Table::new(rows, widths)
        .header(Row::new(heads.into_iter().map(Cell::from)).style(bold).height(height))
        .block(Block::new().borders(Borders::TOP).title(title))
}
