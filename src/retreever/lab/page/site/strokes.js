// Digits drawn by strokes on 28 by 28 pixels, from 0 to 1, centred and of the size that the data have.
const SHAPES = {
  0: [arc(14, 14, 6, 8, 0, 360)],
  2: [[...arc(14, 10.5, 5.5, 5, 190, 370), [9, 22], [20, 22]]],
  3: [arc(13.5, 9.8, 5, 4.4, 200, 440), arc(13.5, 18, 5.6, 4.6, 280, 520)],
  5: [[[19, 6], [10, 6], [9.5, 13], ...arc(13.5, 17, 5.6, 5, 240, 490)]],
  7: [[[8.5, 6.5], [19.5, 6.5], [12.5, 22]]],
};

// Points on an ellipse, by angles in degrees, clockwise from the right.
function arc(x, y, rx, ry, from, to) {
  return Array.from({ length: 25 }, (_, i) => {
    const angle = ((from + ((to - from) * i) / 24) * Math.PI) / 180;
    return [x + rx * Math.cos(angle), y + ry * Math.sin(angle)];
  });
}

function distance(px, py, [ax, ay], [bx, by]) {
  const [dx, dy] = [bx - ax, by - ay];
  const t = Math.min(1, Math.max(0, ((px - ax) * dx + (py - ay) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(px - ax - t * dx, py - ay - t * dy);
}

export function strokes(digit) {
  return Array.from({ length: 28 * 28 }, (_, i) => {
    let nearest = Infinity;
    for (const line of SHAPES[digit]) {
      for (let k = 1; k < line.length; k += 1) {
        nearest = Math.min(nearest, distance(i % 28, Math.floor(i / 28), line[k - 1], line[k]));
      }
    }
    return Math.min(1, Math.max(0, 2.1 - nearest)); // ink about three pixels wide, with soft edges
  });
}
