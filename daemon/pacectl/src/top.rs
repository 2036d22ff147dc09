//! `pacectl top`: the traffic of each class and tunnel, live.

use std::{
    collections::HashMap,
    io::{self, IsTerminal as _},
    time::{Duration, SystemTime},
};

use anyhow::{Result, bail, ensure};
use api::{ControlClient, say, v1};
use crossterm::event::{Event, EventStream, KeyCode, KeyEvent, KeyModifiers};
use futures::StreamExt as _;
use ratatui::{
    DefaultTerminal, Frame,
    layout::{Constraint, Layout},
    text::Line,
    widgets::{Block, Borders, Row},
};

use self::{models::Models, table::table};
use super::{
    columns::{
        CLASS, Column, DROPPED, EXPIRED_STREAMS, LATE_PACKETS, LATE_PAYLOADS, QUEUE, RATE, SOJOURN, TUNNELS, legend,
    },
    door::first_pages,
    table::{age, bytes, or_dash, rate, sender, span},
};

mod models;
mod table;

/// How many pages of tunnels are compared, each of 1000: comparing all tunnels every second would load a daemon that has very many.
const PAGES: usize = 10;

const KEYS: &str = "q quit  ? help  space pause  m models  b/c/d/p/l sort";

/// The columns about classes, with their widths in characters; the rest of a line is the class's name.
const COLUMNS: [(Column, u16); 8] = [
    (TUNNELS, 7),
    (RATE, 11),
    (QUEUE, 5),
    (SOJOURN, 7),
    (LATE_PAYLOADS, 8),
    (LATE_PACKETS, 7),
    (DROPPED, 7),
    (EXPIRED_STREAMS, 7),
];

/// Explains columns and keys.
fn help() -> Vec<Line<'static>> {
    let columns = legend(COLUMNS.iter().map(|(column, _)| column)).map(|line| format!("  {line}"));
    ["Each class, toward clients or toward an edge's relay, in the last second:".to_owned()]
        .into_iter()
        .chain(columns)
        .chain([
            "Each tunnel: \"from\" is the user, or the sender at an edge; up is to the target.".to_owned(),
            "  sort by  b bytes  c policy order  d dropped  p late payloads  l late packets".to_owned(),
            "  m switches to engines and requests for models, and back".to_owned(),
            "  ? again shows the tunnels".to_owned(),
        ])
        .map(Line::from)
        .collect()
}

/// The order of classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    /// The order of the policy.
    #[default]
    Class,
    /// The most bytes first.
    Bytes,
    /// The most drops first.
    Drops,
    /// The most late packets first.
    LatePackets,
    /// The most late payloads first.
    LatePayloads,
}

/// The state of the screen.
#[derive(Default)]
struct Screen {
    before: Option<v1::WatchStatsResponse>,
    now: v1::WatchStatsResponse,
    tunnels: Vec<Moved>,
    /// Whether there are more tunnels than those.
    has_more_tunnels: bool,
    models: Models,
    status: v1::GetStatusResponse,
    order: Order,
    is_paused: bool,
    shows_help: bool,
    shows_models: bool,
}

/// A tunnel, and its traffic since the last update.
struct Moved {
    tunnel: v1::Tunnel,
    /// In bits a second to the target and from it; `None` for a tunnel that is shown for the first time and is older than
    /// the last update.
    rates: Option<(f64, f64)>,
}

impl Moved {
    fn bits_per_sec(&self) -> f64 {
        self.rates.map_or(0.0, |(up, down)| up + down)
    }
}

/// A class, and its traffic since the last update.
#[derive(Clone, Debug)]
struct Change {
    of: v1::ClassStats,
    bits_per_sec: f64,
    /// The number of waiting payloads, averaged over time: the arrivals during a mean wait (Little's law, from the sent
    /// payloads).
    queue: f64,
    /// The mean wait of sent payloads.
    sojourn: Option<Duration>,
    /// Payloads that left after their deadline.
    late_payloads: u64,
    /// Packets that reached the kernel late.
    late_packets: u64,
    dropped: u64,
    expired: u64,
}

pub(crate) async fn run(client: &mut ControlClient, as_json: bool) -> Result<()> {
    if as_json {
        return print(client).await;
    }
    ensure!(io::stdout().is_terminal(), "top needs a terminal; `pacectl top --json` is for programs");
    let mut terminal = ratatui::try_init()?;
    let outcome = show(client, &mut terminal).await;
    ratatui::try_restore()?;
    outcome
}

/// Prints the counters since the start, one line each second.
async fn print(client: &mut ControlClient) -> Result<()> {
    let mut stats = client.watch_stats(v1::WatchStatsRequest::default()).await?.into_inner();
    while let Some(found) = stats.message().await? {
        say!("{}", serde_json::to_string(&found)?);
    }
    bail!("the daemon ended")
}

async fn show(client: &mut ControlClient, terminal: &mut DefaultTerminal) -> Result<()> {
    let mut screen =
        Screen { status: client.get_status(v1::GetStatusRequest {}).await?.into_inner(), ..Screen::default() };
    let mut stats = client.watch_stats(v1::WatchStatsRequest::default()).await?.into_inner();
    let mut keys = EventStream::new();
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        tokio::select! {
            found = stats.message() => {
                let found = found?;
                ensure!(found.is_some(), "the daemon ended");
                if screen.is_paused {
                    continue;
                }
                let tunnels = look_at_tunnels(client).await?;
                screen.update(found.unwrap_or_default(), tunnels);
                if screen.shows_models {
                    screen.models = look_at_models(client).await?;
                }
            }
            key = keys.next() => match key {
                Some(Ok(Event::Key(key))) if screen.on_key(key) => return Ok(()),
                Some(Ok(_)) if screen.shows_models && !screen.is_paused => screen.models = look_at_models(client).await?,
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.into()),
                None => return Ok(()),
            }
        }
    }
}

/// Returns the open tunnels on the first [`PAGES`] pages, and whether there are more.
async fn look_at_tunnels(client: &mut ControlClient) -> Result<(Vec<v1::Tunnel>, bool)> {
    first_pages(PAGES, async |page_token| {
        let asked = v1::ListTunnelsRequest { page_token, ..v1::ListTunnelsRequest::default() };
        let page = client.list_tunnels(asked).await?.into_inner();
        Ok((page.tunnels, page.next_page_token))
    })
    .await
}

async fn look_at_models(client: &mut ControlClient) -> Result<Models> {
    let engines = client.list_engines(v1::ListEnginesRequest {}).await?.into_inner().engines;
    let requests = client.list_requests(v1::ListRequestsRequest::default()).await?.into_inner().requests;
    Ok(Models { engines, requests })
}

impl Screen {
    fn update(&mut self, now: v1::WatchStatsResponse, (tunnels, has_more): (Vec<v1::Tunnel>, bool)) {
        if self.is_paused {
            return;
        }
        let span = span(&self.now, &now);
        let seen: HashMap<_, _> = self.tunnels.iter().map(|was| (was.tunnel.id, &was.tunnel)).collect();
        let at = |time: Option<prost_types::Timestamp>| time.and_then(|time| SystemTime::try_from(time).ok());
        let moved = |tunnel: v1::Tunnel| {
            let is_new = at(tunnel.since) > at(self.now.time);
            let was = seen.get(&tunnel.id).map(|was| (was.up_bytes, was.down_bytes)).or(is_new.then_some((0, 0)));
            let rates = was.zip(span).map(|((up, down), span)| {
                let rate = |now: u64, was: u64| now.saturating_sub(was) as f64 * 8.0 / span.as_secs_f64();
                (rate(tunnel.up_bytes, up), rate(tunnel.down_bytes, down))
            });
            Moved { tunnel, rates }
        };
        let mut tunnels: Vec<_> = tunnels.into_iter().map(moved).collect();
        tunnels.sort_by(|a, b| b.bits_per_sec().total_cmp(&a.bits_per_sec()));
        (self.tunnels, self.has_more_tunnels) = (tunnels, has_more);
        self.before = Some(std::mem::replace(&mut self.now, now)).filter(|before| before.time.is_some());
    }

    /// Handles a key; returns whether it was the key to quit.
    fn on_key(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('?') => self.shows_help = !self.shows_help,
            KeyCode::Char('m') => self.shows_models = !self.shows_models,
            KeyCode::Char(' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('b') => self.order = Order::Bytes,
            KeyCode::Char('c') => self.order = Order::Class,
            KeyCode::Char('d') => self.order = Order::Drops,
            KeyCode::Char('p') => self.order = Order::LatePayloads,
            KeyCode::Char('l') => self.order = Order::LatePackets,
            _ => {}
        }
        false
    }

    /// Returns each class's traffic since the last update, in the selected order.
    fn changes(&self) -> Vec<Change> {
        let span = self.before.as_ref().and_then(|before| span(before, &self.now));
        let change = |of: &v1::ClassStats| {
            let mut was = self.before.iter().flat_map(|before| &before.classes);
            let was = was.find(|was| was.class == of.class && was.role == of.role).cloned();
            let was = was.unwrap_or_else(|| if self.before.is_some() { v1::ClassStats::default() } else { of.clone() });
            let waited =
                |of: &v1::ClassStats| of.sojourn.and_then(|of| Duration::try_from(of).ok()).unwrap_or_default();
            // A class that was missing for a while counts from zero.
            let since = u64::saturating_sub;
            let payloads = u32::try_from(since(of.sent_payloads, was.sent_payloads)).unwrap_or(u32::MAX);
            let dropped = |of: &v1::ClassStats| of.dropped_full + of.dropped_late + of.dropped_sojourn;
            let waiting = waited(of).saturating_sub(waited(&was));
            let per_second = |amount: f64| span.map_or(0.0, |span| amount / span.as_secs_f64());
            Change {
                bits_per_sec: per_second(since(of.sent_bytes, was.sent_bytes) as f64 * 8.0),
                queue: per_second(waiting.as_secs_f64()),
                sojourn: waiting.checked_div(payloads),
                late_payloads: since(of.late_payloads, was.late_payloads),
                late_packets: since(of.late_packets, was.late_packets),
                dropped: since(dropped(of), dropped(&was)),
                expired: since(of.expired_streams, was.expired_streams),
                of: of.clone(),
            }
        };
        let mut changes: Vec<_> = self.now.classes.iter().map(change).collect();
        match self.order {
            Order::Class => {}
            Order::Bytes => changes.sort_by(|a, b| b.bits_per_sec.total_cmp(&a.bits_per_sec)),
            Order::Drops => changes.sort_by_key(|change| std::cmp::Reverse(change.dropped)),
            Order::LatePayloads => changes.sort_by_key(|change| std::cmp::Reverse(change.late_payloads)),
            Order::LatePackets => changes.sort_by_key(|change| std::cmp::Reverse(change.late_packets)),
        }
        changes
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let changes = self.changes();
        let rows = u16::try_from(changes.len()).unwrap_or(u16::MAX).saturating_add(3);
        let help = self.shows_help.then(help);
        // The help replaces the tunnels, and on a small terminal also some classes.
        let most = match &help {
            Some(help) => frame.area().height.saturating_sub(4 + help.len() as u16),
            None => frame.area().height / 2,
        };
        let classes = Constraint::Length(rows.min(most));
        let [head, upper, lower, foot] =
            Layout::vertical([Constraint::Length(2), classes, Constraint::Min(3), Constraint::Length(1)])
                .areas(frame.area());
        let v1::WatchStatsResponse { revision, connections, tunnels, late_packets, .. } = &self.now;
        let pause = if self.is_paused { "  PAUSED" } else { "" };
        let title = format!(
            "paced {}, up {}  revision {revision}{pause}",
            self.status.version,
            age(self.status.started.as_ref())
        );
        let counts =
            format!("{connections} connections  {tunnels} tunnels  {late_packets} late packets since the start");
        frame.render_widget(ratatui::widgets::Paragraph::new(vec![Line::from(title), Line::from(counts)]), head);

        if self.shows_models && !self.shows_help {
            frame.render_widget(Line::from(KEYS), foot);
            return self.models.draw(frame, upper.union(lower));
        }

        let shown = |change: Change| {
            let sojourn = change.sojourn.map_or_else(|| "-".into(), |wait| milliseconds(wait.as_secs_f64() * 1e3));
            let number = |number: u64| if number == 0 { "-".to_owned() } else { number.to_string() };
            // Most relays have no edge role.
            let is_edge = change.of.role == "edge";
            Row::new([
                if is_edge { format!("edge: {}", change.of.class) } else { change.of.class },
                change.of.tunnels.to_string(),
                rate(change.bits_per_sec),
                format!("{:.1}", change.queue),
                sojourn,
                number(change.late_payloads),
                number(change.late_packets),
                number(change.dropped),
                number(change.expired),
            ])
        };
        let widths =
            std::iter::once(Constraint::Fill(1)).chain(COLUMNS.iter().map(|(_, width)| Constraint::Length(*width)));
        let heads = std::iter::once(&CLASS).chain(COLUMNS.iter().map(|(column, _)| column)).map(Column::head).collect();
        let rows = changes.into_iter().map(shown);
        frame.render_widget(table(heads, rows, widths.collect(), "classes, in the last second"), upper);

        frame.render_widget(Line::from(KEYS), foot);
        if let Some(help) = help {
            let block = Block::new().borders(Borders::TOP).title("help");
            frame.render_widget(ratatui::widgets::Paragraph::new(help).block(block), lower);
            return;
        }
        let shown: Vec<_> = self.tunnels.iter().take(usize::from(lower.height)).map(tunnel).collect();
        let width = |cell: &String| u16::try_from(cell.chars().count()).unwrap_or(u16::MAX);
        let widest = |column: usize| shown.iter().map(|row| width(&row[column])).max().unwrap_or(0);
        let widths = tunnel_widths(lower.width, [widest(1), widest(2), widest(3)]);
        let cell = |(column, (cell, width)): (usize, (String, &u16))| match column {
            1 | 3 => shortened(&cell, *width),
            _ => cell,
        };
        let rows = shown
            .into_iter()
            .map(|row| Row::new(row.into_iter().zip(&widths).enumerate().map(cell).collect::<Vec<_>>()));
        let heads = ["tunnel", "from", "class", "target", "up", "down", "moved"].map(str::to_owned);
        let heads = heads.into_iter().take(widths.len()).collect();
        let constraints = widths.iter().copied().map(Constraint::Length).collect();
        let title = if self.has_more_tunnels {
            format!("busiest of the oldest {} tunnels", self.tunnels.len())
        } else {
            "busiest tunnels".to_owned()
        };
        frame.render_widget(table(heads, rows, constraints, &title), lower);
    }
}

/// Returns the cells of a tunnel.
fn tunnel(of: &Moved) -> [String; 7] {
    let Moved { tunnel, rates } = of;
    let shown = |bits_per_sec: Option<f64>| bits_per_sec.map_or_else(|| "-".into(), rate);
    [
        tunnel.id.to_string(),
        sender(tunnel),
        tunnel.class.clone(),
        or_dash(&tunnel.target),
        shown(rates.map(|(up, _)| up)),
        shown(rates.map(|(_, down)| down)),
        bytes(tunnel.up_bytes + tunnel.down_bytes),
    ]
}

/// Returns the widths of the columns about tunnels; "from", "class" and "target" would like to have `wanted`. On a narrow screen, first
/// "moved" makes room for addresses, and then the class.
fn tunnel_widths(screen: u16, wanted: [u16; 3]) -> Vec<u16> {
    const ID: u16 = 6;
    const RATE: u16 = 11;
    const MOVED: u16 = 8;
    let [from, class, target] = [wanted[0].max(6), wanted[1].clamp(5, 12), wanted[2].max(6)];
    // Without "moved", with a space between each two columns.
    let rest = screen.saturating_sub(ID + 2 * RATE + 5);
    let places = from.saturating_add(target);
    let has_moved = places.saturating_add(class + 1 + MOVED) <= rest;
    let rest = if has_moved { rest - 1 - MOVED } else { rest };
    let class = class.min(rest.saturating_sub(places).max(8)).min(rest);
    let room = rest - class;
    // What one of them leaves of its half is for the other.
    let target = target.min(room - from.min(room / 2));
    let widths = [ID, room - target, class, target, RATE, RATE];
    widths.into_iter().chain(has_moved.then_some(MOVED)).collect()
}

/// Cuts the middle out of an address that is longer than `width`, so that its beginning and its port stay.
fn shortened(address: &str, width: u16) -> String {
    let (letters, width) = (address.chars().collect::<Vec<_>>(), usize::from(width));
    if letters.len() <= width {
        return address.to_owned();
    }
    let port = letters.iter().rev().position(|letter| *letter == ':').map_or(0, |at| at + 1);
    let end = port.max(width / 2).min(width.saturating_sub(1));
    let begin = width.saturating_sub(1 + end);
    letters[..begin].iter().chain(&['…']).chain(&letters[letters.len() - end..]).collect()
}

/// Shows milliseconds in seven characters.
fn milliseconds(wait: f64) -> String {
    let digits = usize::from(wait < 100.0);
    format!("{wait:.digits$} ms")
}

#[cfg(test)]
mod tests;
