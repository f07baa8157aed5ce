//! Colours and type of all pictures.

use plotters::style::RGBColor;

/// The font and its size in pixels.
pub const FONT: (&str, i32) = ("system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif", 12);

/// Okabe and Ito's colours, told apart by the colour-blind too, without the yellow that white
/// swallows.
pub const COLOURS: [RGBColor; 8] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x00, 0x00, 0x00),
    RGBColor(0x88, 0x22, 0x55),
];
