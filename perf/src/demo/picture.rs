//! A picture of runs, as SVG: for each load the share of each class that met its deadline, and the score.

use instruments::svg::{begin, line, rectangle, text};

use super::{
    arrivals::Class,
    contender::Contender,
    rows::{Run, Together, together},
};

const WIDTH: f64 = 250.0;
const HEIGHT: f64 = 180.0;
const LEFT: f64 = 44.0;
const TOP: f64 = 84.0;
const FOOT: f64 = 76.0;
const GAP: f64 = 26.0;

/// The colour of each contender.
const COLORS: [&str; 2] = ["#a0a0a0", "#4878a8"];

/// Draws all loads: a panel for each class and one for the score, in each a pair of bars for each load.
#[must_use]
pub fn picture(runs: &[Run]) -> String {
    let size = (10.0 + (Class::ALL.len() + 1) as f64 * (LEFT + WIDTH + GAP), TOP + HEIGHT + FOOT);
    let all = together(runs);
    let conditions = runs.first().map_or_else(String::new, |run| {
        let (engines, link_mbit) = (run.engine.name(), run.link_mbit);
        let seeds = match all.first().map_or(1, |of| of.seeds.len()) {
            1 => format!("seed {}", run.seed),
            count => format!("{count} seeds together"),
        };
        format!(
            "engines: {engines}; link: {link_mbit} Mbit/s, filled by a download; {seeds}; the same requests for both"
        )
    });
    let mut svg = begin(size, "Three models behind a thin link", &conditions);
    for (at, class) in Class::ALL.iter().enumerate() {
        panel(&mut svg, at, &format!("{} requests: deadlines met", class.name()), &all, |of| {
            let (met, requests) = of.met.get(class)?;
            Some((*met as f64 / (*requests).max(1) as f64, format!("{met}/{requests}")))
        });
    }
    let score = |of: &Together| Some((of.score[0], format!("{:.2}", of.score[0])));
    panel(&mut svg, Class::ALL.len(), "score of all requests", &all, score);
    let (mut x, y) = (12.0 + LEFT, size.1 - 11.0);
    for (contender, color) in Contender::ALL.iter().zip(COLORS) {
        rectangle(&mut svg, (x, y - 9.0), (12.0, 10.0), &format!("fill=\"{color}\""));
        text(&mut svg, (x + 17.0, y), "start", "", contender.name());
        x += 150.0;
    }
    let meaning = "score: what the model's answers are worth where they are in time, else 0";
    text(&mut svg, (x, y), "start", "fill=\"#555\"", meaning);
    svg + "</svg>\n"
}

/// Draws one panel: for each load and contender a bar, whose height from 0 to 1 and label `bar` returns.
fn panel(svg: &mut String, at: usize, title: &str, all: &[Together], bar: impl Fn(&Together) -> Option<(f64, String)>) {
    let left = 10.0 + LEFT + (LEFT + WIDTH + GAP) * at as f64;
    let y = |share: f64| TOP + HEIGHT * (1.0 - share);
    text(svg, (left, TOP - 20.0), "start", "font-weight=\"bold\"", title);
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        line(svg, (left, y(share)), (left + WIDTH, y(share)), "stroke=\"#e4e4e4\"");
        text(svg, (left - 6.0, y(share) + 4.0), "end", "fill=\"#555\"", &share.to_string());
    }
    let mut loads: Vec<_> = all.iter().map(|of| of.load).collect();
    loads.dedup();
    let pair = WIDTH / loads.len().max(1) as f64;
    let width = (pair * 0.4).min(44.0);
    for (place, load) in loads.iter().enumerate() {
        let middle = left + pair * (place as f64 + 0.5);
        for ((contender, color), side) in Contender::ALL.iter().zip(COLORS).zip([-1.0, 0.0]) {
            let of = all.iter().find(|of| of.load == *load && of.contender == contender.name());
            let Some((share, label)) = of.and_then(&bar) else { continue };
            let x = middle + side * width;
            rectangle(svg, (x, y(share)), (width, HEIGHT * share), &format!("fill=\"{color}\""));
            text(svg, (x + width / 2.0, y(share) - 4.0), "middle", "font-size=\"10\"", &label);
        }
        let rate = all.iter().find(|of| of.load == *load).map_or(0.0, |of| of.per_second);
        text(svg, (middle, TOP + HEIGHT + 15.0), "middle", "fill=\"#555\"", &format!("{rate:.1}"));
    }
    text(svg, (left + WIDTH / 2.0, TOP + HEIGHT + 31.0), "middle", "fill=\"#555\"", "requests per second");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::rows::tests::some;

    #[test]
    fn each_load_has_a_bar_of_each_contender_in_each_panel_with_its_counts() {
        let svg = picture(&some());
        let bars = COLORS.map(|color| svg.matches(&format!("fill=\"{color}\"")).count());
        assert_eq!(bars, [3 * 2 + 1, 3 * 2 + 1], "and one in the legend");
        assert_eq!((svg.matches(">2/4<").count(), svg.matches(">1/3<").count()), (3, 3));
        assert!(svg.contains("seed 7") && svg.contains("emulated"));
    }
}
