# Draws the CPU of draining an event by batch size, and how it grows while a transaction
# stays open, from the figures of `make bench SUITE=outbox` that
# docs/performance.md has: gnuplot -e "data = '...'; picture = '...'" docs/drain.gnuplot

set terminal svg size 960, 420 font "sans,13" background "white"
set output picture
set datafile separator ","
set yrange [0:*]
set grid ytics linecolor "#dddddd"
set border 3
set tics nomirror

# columns: measure, at, hand, pgq, idempotency
of(measure, column) = strcol(1) eq measure ? column(column) : NaN

set multiplot layout 1, 2

set title "PgQ is cheaper in large batches only"
set ylabel "server CPU for an event, us"
set logscale x
set xlabel "events in a batch"
set xrange [80:6000]
set xtics (100, 500, 5000)
set format y "%.0f"
set key bottom left Left reverse
plot \
	data every ::1 using (of("cost", 2)):3 with linespoints linewidth 2 pointtype 7 linecolor "#b0413e" title "hand-written", \
	data every ::1 using (of("cost", 2)):4 with linespoints linewidth 2 pointtype 7 linecolor "#c98a1b" title "PgQ", \
	data every ::1 using (of("cost", 2)):5 with linespoints linewidth 2 pointtype 7 linecolor "#2f6690" title "idempotency"

set title "Only the cost of idempotency stays flat under old snapshots"
set ylabel "CPU in the last fifth, of that in the first"
unset logscale x
unset xlabel
unset key
set xrange [-0.6:1.6]
set xtics ("a snapshot is held" 0, "a publisher is open" 1)
set format y "%.1f"
set boxwidth 0.24
set style fill solid
plot \
	data every ::4 using ($0 - 0.26):3 with boxes linecolor "#b0413e", \
	data every ::4 using ($0):4 with boxes linecolor "#c98a1b", \
	data every ::4 using ($0 + 0.26):5 with boxes linecolor "#2f6690"

unset multiplot
