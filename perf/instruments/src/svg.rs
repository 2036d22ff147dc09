//! Shapes of SVG, written by hand: a chart of `plotters` lies on whole pixels, these on tenths, and the whiskers of its box
//! plots end 1.5 interquartile ranges beyond the quartiles even if no value is there, and so possibly below 0.

use std::fmt::Write as _;

/// Returns the beginning of a picture of this size on a white background, with a title and the conditions below it.
#[must_use]
pub fn begin((width, height): (f64, f64), title: &str, conditions: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut svg, (12.0, 22.0), "start", "font-size=\"15\" font-weight=\"bold\"", title);
    text(&mut svg, (12.0, 41.0), "start", "fill=\"#555\"", conditions);
    svg
}

/// Draws a line.
pub fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), stroke: &str) {
    _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" {stroke}/>",
        from.0, from.1, to.0, to.1
    );
}

/// Draws a rectangle from its upper left corner.
pub fn rectangle(svg: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), fill: &str) {
    _ = writeln!(svg, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" {fill}/>");
}

/// Writes text, and escapes it.
pub fn text(svg: &mut String, at: (f64, f64), anchor: &str, attributes: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" {attributes}>{content}</text>",
        at.0, at.1
    );
}
