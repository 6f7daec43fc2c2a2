# Draws what an operation (claim and complete) costs above its business insert when
# many keys are stored already and expired ones are deleted meanwhile, from what
# `make bench SUITE=scale` has measured:
# gnuplot -e "data = '...'; picture = '...'" docs/scale.gnuplot

set terminal svg size 960, 420 font "sans,13" background "white"
set output picture
set datafile separator ","
set logscale x
set format x "10^{%L}"
set xlabel "stored keys"
set yrange [0:*]
set grid ytics linecolor "#dddddd"
set border 3
set tics nomirror
set key at graph 0.99, 0.46 reverse Left

# columns: kind, contestant, keys, wal_bytes, cpu_us, reaped_wal_bytes, reaped_cpu_us, bytes_per_key
of(kind, contestant, column) = \
	strcol(1) eq kind && strcol(2) eq contestant ? column(column) : NaN

set multiplot layout 1, 2

set title "Beside the reaper, UUIDv7 keys keep the WAL flat"
set ylabel "bytes an operation, right after a checkpoint"
plot \
	data every ::1 using 3:(of("v4", "hand", 6)) with linespoints linewidth 2 pointtype 6 linecolor "#b0413e" title "hand-written, random keys", \
	data every ::1 using 3:(of("v7", "hand", 6)) with linespoints linewidth 2 pointtype 7 linecolor "#b0413e" title "hand-written, UUIDv7", \
	data every ::1 using 3:(of("v4", "idempotency", 6)) with linespoints linewidth 2 pointtype 6 linecolor "#2f6690" title "idempotency, random keys", \
	data every ::1 using 3:(of("v7", "idempotency", 6)) with linespoints linewidth 2 pointtype 7 linecolor "#2f6690" title "idempotency, UUIDv7"

set title "Beside the reaper, UUIDv7 keys keep the CPU nearly flat"
set ylabel "microseconds of server CPU an operation"
unset key
plot \
	data every ::1 using 3:(of("v4", "hand", 7)) with linespoints linewidth 2 pointtype 6 linecolor "#b0413e", \
	data every ::1 using 3:(of("v7", "hand", 7)) with linespoints linewidth 2 pointtype 7 linecolor "#b0413e", \
	data every ::1 using 3:(of("v4", "idempotency", 7)) with linespoints linewidth 2 pointtype 6 linecolor "#2f6690", \
	data every ::1 using 3:(of("v7", "idempotency", 7)) with linespoints linewidth 2 pointtype 7 linecolor "#2f6690"

unset multiplot
